"""Tokens/s of the whole loop on a GPU: plain, n-gram, EAGLE chain and tree, on every installed backend.

    python -m benchmarks.decode.end_to_end --json benchmarks/results/end-to-end-h200.json --minutes 8

There are two models (`models`): SmolLM2-135M-Instruct with its trained head, for which texts are compared, and a
Llama-3-8B shape with random weights and forced acceptance (`PROFILES`). transformers' own generation is measured in the
same process. The most useful cases come first. A run that is out of time leaves out the rest, and `--resume` adds them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from draftmark.registry import available, load
from draftmark_speculative import EngineConfig, decode
from draftmark_speculative.engine import Engine
from heads.smollm2_135m.training.prompts import HELD_OUT
from heads.smollm2_135m.training.text import chat, laid_end_to_end

from .measure import Case, Measured, answers, near_ties, peer, release, window
from .models import LLAMA, SMOLLM2, Subject, llama, smollm2
from .timeline import predicted_attention, timeline

PROFILES: dict[str, tuple[float, ...]] = {
    "ngram": (0.45, 0.6, 0.7, 0.7, 0.7, 0.7, 0.7),
    "chain": (0.595, 0.624, 0.704, 0.749),
    "tree": (0.766, 0.727, 0.688, 0.745),
}
"""Forced acceptance of the Llama shape: the probability that a path with i accepted drafts accepts another.

Chain and tree are measured values of SmolLM2's head on held-out prompts (`results/eagle-held-out.json`). N-gram is an
assumption, because it depends on the text.
"""

NONE, NGRAM, CHAIN, TREE, WIDE, DEEP = (1, 1, 1), (1, 1, 8), (1, 4, 5), (4, 4, 16), (8, 4, 32), (8, 6, 48)
WAYS = (("none", NONE), ("ngram", NGRAM), ("chain", CHAIN), ("tree", TREE))
PEER_PROMPTS, PEER_TOKENS = 3, 96
"""Prompts and tokens of transformers' own generate: fewer, because its tokens/s hardly depend on the text."""
BACKENDS = ("cuda_triton", "cuda_flashinfer", "cuda_trtllm")
GRID = [(1, 1024), (64, 8192), (8, 8192), (1, 32768), (8, 1024), (64, 1024), (1, 8192), (8, 32768)]
"""Batch and context of the Llama shape. 64 x 32k is left out: 2,097,152 tokens of KV do not fit the GPU."""


def cases(backends: Sequence[str]) -> Iterator[Case]:
    """Yield every case, the most useful first."""
    first, others = backends[0], backends[1:]
    yield from (Case(SMOLLM2, "answers", first, way, shape, 1, 0) for way, shape in WAYS)
    yield from (Case(SMOLLM2, "answers", first, "tree", shape, 1, 0) for shape in (WIDE, DEEP))
    yield from (Case(SMOLLM2, "window", first, way, shape, 1, 1024) for way, shape in WAYS)
    yield Case(SMOLLM2, "peer", "transformers", "none", NONE, 1, 0)
    yield Case(SMOLLM2, "peer", "transformers", "prompt-lookup", NONE, 1, 0)
    for batch, context in GRID[:3]:
        yield from (Case(LLAMA, "window", first, way, shape, batch, context) for way, shape in WAYS)
    yield from (Case(SMOLLM2, "answers", first, way, shape, 8, 0) for way, shape in WAYS)
    for backend in others:
        yield from (Case(SMOLLM2, "answers", backend, way, shape, 8, 0) for way, shape in WAYS)
        yield from (Case(SMOLLM2, "window", backend, way, shape, 1, 1024) for way, shape in WAYS)
        for batch, context in GRID[:2]:
            yield from (Case(LLAMA, "window", backend, way, shape, batch, context) for way, shape in (WAYS[0], WAYS[3]))
    for batch, context in GRID[3:]:
        yield from (Case(LLAMA, "window", first, way, shape, batch, context) for way, shape in WAYS)
    yield Case(LLAMA, "peer", "transformers", "none", NONE, 1, 1024)
    yield Case(LLAMA, "peer", "transformers", "none", NONE, 8, 1024)
    for batch, context in [(64, 1024), (8, 7680), (1, 7680), (8, 1024), (64, 7680)]:
        yield from (Case(SMOLLM2, "window", first, way, shape, batch, context) for way, shape in WAYS)
    for backend in others:
        for batch, context in GRID[2:]:
            yield from (Case(LLAMA, "window", backend, way, shape, batch, context) for way, shape in WAYS)
        for batch, context in GRID[:2]:
            yield from (Case(LLAMA, "window", backend, way, shape, batch, context) for way, shape in WAYS[1:3])
        yield from (Case(SMOLLM2, "answers", backend, way, shape, 1, 0) for way, shape in WAYS)


TIMELINES = [(model, way, size) for model, size in ((SMOLLM2, 1), (LLAMA, 1), (LLAMA, 64)) for way in ("none", "tree")]
"""Windows of the first backend that the profiler also records: model, drafts, batch."""


@dataclass
class Bench:
    """Holds the models, rows and reference texts of one run. A model is loaded when the first case needs it.

    Attributes:
        absent: reason, by name of a backend that cannot be used.
        kept: fields of the old file that this benchmark does not write.
        texts: first texts of each group of cases (`_group`).
    """

    args: argparse.Namespace
    rows: list[dict[str, Any]]
    timelines: list[dict[str, Any]]
    absent: dict[str, str]
    kept: dict[str, Any] = field(default_factory=dict)
    subjects: dict[str, Subject] = field(default_factory=dict)
    dialogues: list[tuple[int, ...]] = field(default_factory=list)
    texts: dict[tuple[Any, ...], list[tuple[int, ...]]] = field(default_factory=dict)

    def subject(self, name: str) -> Subject:
        """Return the model of that name, made at its first use."""
        if name not in self.subjects:
            device = self.args.device
            dtype = "bfloat16" if device == "cuda" else "float32"
            if name == SMOLLM2:
                self.subjects[name] = smollm2(self.args.model, self.args.head, dtype, device)
            else:
                self.subjects[name] = llama(PROFILES, device, self.args.tiny)
        return self.subjects[name]

    def measure(self, case: Case) -> dict[str, Any]:
        """Return the case's row. A case that fails records the error as its note."""
        start, found = time.perf_counter(), Measured()
        identical: dict[str, Any] = {"identical": None}
        try:
            found, prompts = self._run(case)
            if not self.subject(case.model).forced and found.texts:
                identical = self._compare(case, prompts, found.texts)
        except Exception as error:  # one failing case must not stop the other cases
            traceback.print_exc()
            found.note = f"{type(error).__name__}: {str(error)[:300]}"
        release()
        return {
            **case.key, "tokens_per_s": _round(found.tokens_per_s, 1), "accepted_len": _round(found.accepted_len, 3),
            **identical, "graph_mib": _round(found.graph_mib, 1), "round_ms": _round(found.round_ms, 3),
            "host_lengths": found.host_lengths, "overlap": found.overlap, "note": found.note.strip(),
            "seconds": round(time.perf_counter() - start, 1), "commit": self.args.commit,
        }  # fmt: skip

    def _run(self, case: Case) -> tuple[Measured, list[tuple[int, ...]]]:
        subject, args = self.subject(case.model), self.args
        if case.kind == "window":
            prompts = [] if subject.forced else self._contexts(subject, case)
            wanted = (case.model, case.speculate, case.batch) in TIMELINES and case.backend == self.args.backends[0]
            take = self._timeline(case) if wanted and args.device == "cuda" else None
            # Rounds of the small model are short, so a window has four times the rounds: the waits at both ends then
            # matter less.
            return window(case, subject, prompts, args.rounds * (1 if subject.forced else 4), 3, take), prompts
        if case.model == LLAMA:
            prompts = [tuple((i * 7919) % subject.model.vocab_size for i in range(case.context))]
            return peer(case, subject, prompts, PEER_TOKENS // 3), prompts
        prompts = self._prompts(subject, len(HELD_OUT) if case.batch > 1 else args.prompts)
        if case.kind == "peer":
            prompts = prompts[:PEER_PROMPTS]
            return peer(case, subject, prompts, PEER_TOKENS), prompts
        return answers(case, subject, prompts, args.new_tokens, args.repeats), prompts

    def _prompts(self, subject: Subject, count: int) -> list[tuple[int, ...]]:
        """Return held-out prompts, spread over their kinds."""
        ids = [tuple(tokens) for tokens in chat(subject.model, HELD_OUT)]
        return ids[:: max(1, len(ids) // count)][:count]

    def _contexts(self, subject: Subject, case: Case) -> list[tuple[int, ...]]:
        """Return long dialogues: held-out questions and the model's answers, concatenated to the context's length."""
        if not self.dialogues:
            prompts = self._prompts(subject, len(HELD_OUT))
            config = EngineConfig(
                backend=case.backend, page_size=64, max_num_reqs=len(prompts), max_context_len=512,
                max_extend_tokens=8192,
            )  # fmt: skip
            engine = Engine(subject.model, config)
            generated = decode(engine, prompts, 128)
            self.dialogues = [(*p, *g.tokens) for p, g in zip(prompts, generated, strict=True)]
        count = len(self.dialogues)
        return [laid_end_to_end(self.dialogues, first % count, case.context) for first in range(case.batch)]

    def _timeline(self, case: Case) -> Any:
        def take(engine: Engine) -> None:
            layers = len(engine.model.layers)
            predicted = predicted_attention(case.backend, layers, case.shape, case.batch, case.context)
            found = {**case.key, **timeline(engine), "predicted_attention_us": predicted, "commit": self.args.commit}
            self.timelines = [*(t for t in self.timelines if any(t[k] != found[k] for k in case.key)), found]

        return take

    def _compare(self, case: Case, prompts: Sequence[tuple[int, ...]], texts: list[tuple[int, ...]]) -> dict[str, Any]:
        """Compare a case's texts with plain decoding on the first backend at equal batch size, which ran before.

        Texts of windows and of peers differ in length, so only their common part is compared.
        """
        base = self.texts.setdefault(_group(case), texts)[: len(texts)]
        if case.kind == "answers":
            same = texts == base
        else:
            same = all(a[: len(b)] == b[: len(a)] for a, b in zip(texts, base, strict=True))
        if same:
            return {"identical": True}
        return {"identical": False, **near_ties(self.subject(case.model).model, prompts, texts, base)}


def main() -> None:
    """Measure cases until the time is over, and write the file after each one."""
    args = _arguments()
    args.commit = args.commit or origin.commit()
    start = time.perf_counter()
    old = json.loads(args.json.read_text()) if args.resume and args.json and args.json.exists() else {}
    bench = Bench(args, old.get("rows", []), old.get("timelines", []), {})
    bench.kept = {name: old[name] for name in ("forced_shares",) if name in old}
    args.backends, bench.absent = _backends(args)
    pending = _pending(args, bench.rows)
    for name in dict.fromkeys(case.model for case in pending):
        bench.subject(name)  # a missing model or head ends the run here, not in every case
    left = 0
    for case in pending:
        if time.perf_counter() - start > args.minutes * 60:
            left += 1
            continue
        row = bench.measure(case)
        # Rows with a profile belong to `adaptive`, which writes to the same file.
        others = (r for r in bench.rows if "profile" in r or any(r[name] != row[name] for name in _columns()))
        bench.rows = [*others, row]
        print(json.dumps({name: row[name] for name in row if row[name] not in (None, "")}), flush=True)
        origin.write(args.json, _result(bench, args))
    print(f"{len(bench.rows)} rows, {left} cases left out, {time.perf_counter() - start:.0f} s", flush=True)


def _pending(args: argparse.Namespace, rows: list[dict[str, Any]]) -> list[Case]:
    """Return the selected cases that have no row yet, with the cases that generate the texts to compare them with."""
    words = args.only or ()
    selected = [case for case in cases(args.backends) if all(word in json.dumps(case.key) for word in words)]
    done = [{n: row[n] for n in _columns()} for row in rows if row["tokens_per_s"] and "profile" not in row]
    lacking = [case for case in selected if case.key not in done]
    groups = {_group(case) for case in lacking if case.model == SMOLLM2}
    return [case for case in selected if case in lacking or _group(case) in groups]


def _group(case: Case) -> tuple[Any, ...]:
    """Return a key of the case. All cases of equal key must generate equal texts."""
    return case.model, case.kind if case.kind == "window" else "answers", case.batch, case.context


def _result(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    cuda = args.device == "cuda"
    versions = origin.versions("draftmark", "torch", "triton", "transformers", "flashinfer-python")
    return {
        "schema": 2,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "versions": versions, "dtype": "bfloat16" if cuda else "float32", "page_size": 64,
        "forced_acceptance": {LLAMA: PROFILES}, "new_tokens": args.new_tokens, "rounds_per_window": args.rounds,
        "absent_backends": bench.absent, **bench.kept, "rows": bench.rows, "timelines": bench.timelines,
    }  # fmt: skip


def _backends(args: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Return the names of the backends that load, and for each other backend the reason why it does not."""
    if args.backend:
        return args.backend, {}
    installed, found, absent = {one.name for one in available()}, [], {}
    for name in BACKENDS:
        if name not in installed:
            absent[name] = "not installed"
            continue
        try:
            load(name)
            found.append(name)
        except Exception as error:
            absent[name] = str(error)[:300]
    if not found:
        sys.exit(f"none of {', '.join(BACKENDS)} can be used: {absent}; name one with --backend")
    return found, absent


def _columns() -> list[str]:
    return list(Case("", "", "", "", (0, 0, 0), 0, 0).key)


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--resume", action="store_true", help="keep the rows of the file")
    parser.add_argument("--minutes", type=float, default=8, help="start no case after this time")
    parser.add_argument("--only", nargs="+", help="only cases with all of these words in their columns, as JSON")
    parser.add_argument("--backend", nargs="+", help="backends; by default every installed CUDA backend")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="folder or GGUF file of SmolLM2; by default the bundled one")
    parser.add_argument("--head", help="folder of its draft head; by default the installed one")
    parser.add_argument("--tiny", action="store_true", help="use a tiny Llama shape, to test the benchmark itself")
    parser.add_argument("--prompts", type=int, default=len(HELD_OUT), help="number of answers at batch 1")
    parser.add_argument("--new-tokens", type=int, default=320, help="largest number of tokens of an answer")
    parser.add_argument("--rounds", type=int, default=12, help="rounds per window; a case has three windows")
    parser.add_argument("--repeats", type=int, default=1, help="repeats of the answers")
    parser.add_argument("--commit", help="commit to record; by default DRAFTMARK_COMMIT or git's HEAD")
    return parser.parse_args()


if __name__ == "__main__":
    main()
