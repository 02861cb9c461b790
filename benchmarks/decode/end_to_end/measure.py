"""Measures one case of the end-to-end benchmark: whole answers, or windows of rounds at a constant batch."""

from __future__ import annotations

import copy
import dataclasses
import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from draftmark.devices import synchronize
from draftmark.errors import BackendRefusal
from draftmark_speculative import Eagle, Engine, EngineConfig, HostKind, Ngram, decode
from draftmark_speculative.agreement import Agreement
from draftmark_speculative.compare import compare
from draftmark_speculative.models import CausalLM

from .forced import ForcedAcceptance
from .models import FindingNgram, Subject, seat

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One configuration to measure; it gives one row of the result.

    Attributes:
        model: name of a `Subject`.
        kind: "answers": prompts decoded to their end, prefill included. "window": rounds at a constant batch, after
            the prompts. "peer": answers by transformers' own generate.
        backend: name of the backend, or "transformers" for a peer.
        speculate: "none", "ngram", "chain" or "tree"; for a peer "none" or "prompt-lookup".
        shape: (topk, num_steps, num_draft_tokens).
        context: tokens stored before the window; 0 for answers, which have short prompts.
    """

    model: str
    kind: str
    backend: str
    speculate: str
    shape: tuple[int, int, int]
    batch: int
    context: int

    @property
    def key(self) -> dict[str, Any]:
        """The columns that identify the case's row."""
        topk, steps, nodes = self.shape
        return {
            "model": self.model, "kind": self.kind, "backend": self.backend, "speculate": self.speculate,
            "topk": topk, "num_steps": steps, "num_draft_tokens": nodes, "batch": self.batch, "context": self.context,
        }  # fmt: skip


@dataclass
class Measured:
    """Results of a case; fields are named as in the rows."""

    tokens_per_s: float | None = None
    accepted_len: float | None = None
    round_ms: float | None = None
    graph_mib: float | None = None
    host_lengths: str = ""
    overlap: bool = False
    note: str = ""
    texts: list[Tokens] = field(default_factory=list)


def open_engine(case: Case, subject: Subject, max_context_len: int, graph: bool) -> tuple[Engine, str]:
    """Return an engine for the case, and the reason if the backend rejects overlap; else an empty reason."""
    config = EngineConfig(
        backend=case.backend, speculate=_speculation(case, subject), page_size=64, max_num_reqs=case.batch,
        max_context_len=max_context_len, max_extend_tokens=8192, graph=graph, capture_batch_sizes=(case.batch,),
        host_lengths=HostKind.UPPER_BOUND, overlap=True,
    )  # fmt: skip
    profile, device = subject.forced.get(case.speculate), subject.model.device
    wrap = partial(ForcedAcceptance, profile=profile, seed=0, device=device) if profile else None
    if case.speculate == "ngram":
        return Engine(subject.model, _waiting(config), wrap_tree_ops=wrap), ""
    try:
        return Engine(subject.model, config, wrap_tree_ops=wrap), ""
    except BackendRefusal as refusal:
        return Engine(subject.model, _waiting(config), wrap_tree_ops=wrap), str(refusal)


def answers(case: Case, subject: Subject, prompts: Sequence[Tokens], new_tokens: int, repeats: int) -> Measured:
    """Decode all prompts with one engine, `batch` at a time, and return the median of the repeats."""
    longest = max(map(len, prompts)) + new_tokens
    engine, why = open_engine(case, subject, -(-longest // 64) * 64, graph=subject.model.device.type == "cuda")
    decode(engine, prompts, 3)  # warm-up: some prefill kernels are compiled per prompt length
    engine.statistics = type(engine.statistics)()
    seconds, outputs = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        outputs = decode(engine, prompts, new_tokens)
        seconds.append(time.perf_counter() - start)
    found = _about(engine, why)
    found.texts = [output.tokens for output in outputs]
    found.tokens_per_s = sum(map(len, found.texts)) / statistics.median(seconds)
    found.round_ms = statistics.median(seconds) * 1e3 * repeats / engine.statistics.rounds
    return found


def window(
    case: Case, subject: Subject, prompts: Sequence[Tokens], rounds: int, windows: int, timeline: Any = None
) -> Measured:
    """Measure rounds at a constant batch, with stop tokens ignored, and return the median of the windows.

    Args:
        prompts: one per request; if empty, `models.seat` adds requests with random KV and no prefill.
        rounds: rounds per window; fewer if the model's context limit requires it.
        timeline: function to call with the engine after the windows.
    """
    longest = case.shape[2] if case.speculate == "ngram" else case.shape[1] + 1
    most = subject.model.max_context_len
    rounds = min(rounds, ((most - case.context) // longest - 8) // (windows + 2))
    if rounds < 1:
        raise ValueError(f"context {case.context} leaves no room for rounds of {longest} tokens in {most}; lower it")
    limit = min(-(-(case.context + (8 + rounds * (windows + 2)) * longest) // 64) * 64, most)
    stops, subject.model.stop_token_ids = subject.model.stop_token_ids, ()
    try:
        engine, why = open_engine(case, subject, limit, graph=subject.model.device.type == "cuda")
        ids = range(engine._next_id, engine._next_id + case.batch)
        if prompts:
            for prompt in prompts:
                engine.submit(prompt, limit)
        else:
            seat(engine, case.batch, case.context)
        while engine._scheduler.waiting or engine._scheduler.prefilling:
            engine.step()
        _run(engine, 6)
        before, speeds, lasted = copy.copy(engine.statistics), [], []
        for _ in range(windows):
            tokens, seconds = _run(engine, rounds)
            speeds.append(tokens / seconds)
            lasted.append(seconds / rounds)
        after = engine.statistics
        found = _about(engine, why)
        found.accepted_len = (after.accepted - before.accepted) / max(1, after.verified - before.verified)
        found.tokens_per_s, found.round_ms = statistics.median(speeds), statistics.median(lasted) * 1e3
        found.texts = [engine.output(i) for i in ids]
        if timeline is not None:
            timeline(engine)
        if len(engine._scheduler.running) < case.batch:
            found.note += f" {case.batch - len(engine._scheduler.running)} requests reached the context's end"
        return found
    finally:
        subject.model.stop_token_ids = stops


def peer(case: Case, subject: Subject, prompts: Sequence[Tokens], new_tokens: int) -> Measured:
    """Time transformers' greedy generate, prefill included. Each call runs one prompt, repeated `case.batch` times."""
    hf, device = subject.model.hf, subject.model.device
    extra = {"prompt_lookup_num_tokens": 10} if case.speculate == "prompt-lookup" else {}
    stop = subject.model.stop_token_ids[0] if subject.model.stop_token_ids else None
    texts, tokens, seconds = [], 0, 0.0
    for round_, prompt in enumerate([prompts[0], *prompts]):
        ids = torch.tensor([list(prompt)] * case.batch, device=device)
        synchronize(device)
        start = time.perf_counter()
        with torch.inference_mode():
            out = hf.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens if round_ else 8, do_sample=False,
                eos_token_id=stop, pad_token_id=stop, **extra,
            )  # fmt: skip
        synchronize(device)
        if round_:  # the first round is warm-up
            seconds += time.perf_counter() - start
            tokens += out[:, ids.shape[1] :].numel()
            texts.append(tuple(out[0, ids.shape[1] :].tolist()))
    return Measured(tokens_per_s=tokens / seconds, texts=texts)


def release() -> None:
    """Free the last engine's memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def near_ties(
    model: CausalLM, prompts: Sequence[Tokens], texts: Sequence[Tokens], base: Sequence[Tokens]
) -> dict[str, Any]:
    """Compare generated texts with the baseline's. A first difference is allowed where two logits nearly tie.

    Texts are cut to their common length, because a window's length depends on the accepted length.
    """
    pairs = [(text[: len(other)], other[: len(text)]) for text, other in zip(texts, base, strict=True)]
    apart = [(prompt, *pair) for prompt, pair in zip(prompts, pairs, strict=True) if pair[0] != pair[1]]
    differing, mine, theirs = zip(*apart, strict=True) if apart else ((), (), ())
    found = compare(model, differing, mine, {"plain": theirs}) if apart else Agreement()
    gap = round(max(found.gaps.values(), default=0.0), 4)
    return {
        "differing": len(apart), "largest_gap": gap, "bound": round(found.bound, 4), "wrong": len(found.wrong_texts),
    }  # fmt: skip


def _run(engine: Engine, rounds: int) -> tuple[int, float]:
    """Run `rounds` decoding rounds. Return the number of accepted tokens and the seconds."""
    before = engine.statistics.accepted
    synchronize(engine.model.device)
    start = time.perf_counter()
    for _ in range(rounds):
        engine.step()
    synchronize(engine.model.device)
    return engine.statistics.accepted - before, time.perf_counter() - start


def _about(engine: Engine, why: str) -> Measured:
    return Measured(
        accepted_len=engine.statistics.mean_accepted, graph_mib=engine.graph_bytes / 2**20,
        host_lengths=engine.config.host_lengths.value, overlap=engine.config.overlap, note=why,
    )  # fmt: skip


def _speculation(case: Case, subject: Subject) -> Any:
    topk, steps, nodes = case.shape
    if case.speculate == "none":
        return None
    if case.speculate == "ngram":
        return (FindingNgram if subject.forced else Ngram)(topk, nodes)
    assert subject.head is not None, f"{subject.name} has no draft head"
    return Eagle(subject.head, topk, steps, nodes)


def _waiting(config: EngineConfig) -> EngineConfig:
    """Return the engine configuration, changed to exact host lengths and no overlap of host and device."""
    return dataclasses.replace(config, host_lengths=HostKind.EXACT, overlap=False)
