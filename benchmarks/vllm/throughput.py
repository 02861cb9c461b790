"""Tokens/s of prefill, decode, verify and mixed steps, measured step by step in vLLM's own loop."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

from draftmark import DTYPE_BYTES

from .confident import Verified, make_confident, measure_again, settle
from .engines import BLOCK_LAYERS, KV_DTYPES, Engine, prompts
from .shapes import SHAPES

LONG_PREFILL = 1 << 14
"""Tokens above which a prefill is timed only once by default, and skips the common warm-up."""
SPARE = 64
"""Extra KV tokens of a request: its partly filled last page, and drafts beyond its last step."""
AHEAD = 6
"""Twice the number of steps that an engine may have launched before its host sees a first token."""
PERIOD = 32
"""Tokens after which the prompts of n-gram cases repeat."""


@dataclass(frozen=True)
class Case:
    """One timed case: requests that start together.

    Attributes:
        batch: number of requests.
        context: tokens of each request's prompt.
        steps: decode or verify steps to time; 0 times the prefill only.
        uneven: every other prompt has no repetition, so that some requests of a step have no n-gram drafts.
        turns: number of timed turns; 0 for the run's default.
        new: in a prefill, tokens of each request after a context that is not computed; 0 computes the context.
        `beside`: in mixed steps, tokens of a prompt that arrives when all requests decode. Its first token ends a run.
    """

    batch: int
    context: int
    steps: int = 0
    uneven: bool = False
    turns: int = 0
    new: int = 0
    beside: int = 0

    @property
    def name(self) -> str:
        """Name of the case, for example ``64x1k``, ``8x8k+64`` or ``64x1k-beside-8k``."""
        behind = (f"+{self.new}" if self.new else "") + (f"-beside-{self.beside // 1024}k" if self.beside else "")
        return f"{self.batch}x{self.context // 1024}k" + behind + ("-uneven" if self.uneven else "")

    @property
    def computed(self) -> int:
        """Number of prompt tokens that are computed while the case is timed."""
        return self.beside or self.batch * (self.new or self.context)

    @property
    def decodes(self) -> bool:
        """True if requests decode while the case is timed; otherwise it times a prefill."""
        return bool(self.steps or self.beside)

    @property
    def is_long(self) -> bool:
        """True if the case times a prefill of more than `LONG_PREFILL` tokens."""
        return not self.steps and self.computed > LONG_PREFILL

    def asked_of(self, engine: Engine) -> bool:
        """Return whether an engine of this phase runs the case.

        An `uneven` case has requests without drafts, so it needs n-gram drafts: a draft head drafts for every request.
        Cases with `new` or `beside` need `skip_prefill`. The engine's pages must hold all requests.
        """
        if self.uneven and (not engine.drafts or engine.drafter != "ngram"):
            return False
        if (self.new or self.beside) and not engine.skip_prefill:
            return False
        return fits(self, engine) and (not engine.only or self.name in engine.only)


def fits(case: Case, engine: Engine) -> bool:
    """Return whether the engine's pages hold all requests of a case at once."""
    steps = case.steps or _mixed_steps(case, engine)
    tokens = case.batch * (case.context + case.new + steps * (1 + engine.drafts) + SPARE) + case.beside
    return engine.kv_bytes is None or tokens * token_bytes(engine) <= engine.kv_bytes


def token_bytes(engine: Engine) -> int:
    """Return the bytes of one token's KV on one device, in the layers of the target and of a draft head."""
    shape = SHAPES[engine.shape]
    own = BLOCK_LAYERS if engine.drafter == "dflash" else engine.drafter != "ngram"
    layers: int = shape["num_hidden_layers"] + (own if engine.drafts else 0)
    each = DTYPE_BYTES[KV_DTYPES[engine.kv_dtype]]
    if "kv_lora_rank" in shape:  # every rank holds all rows
        return each * (shape["kv_lora_rank"] + shape["qk_rope_head_dim"]) * layers
    return 2 * each * shape["num_key_value_heads"] * shape["head_dim"] * layers // engine.num_gpus


class Watch:
    """Observes the timed part of a case: the prefill until every request has a token, or the steps after that."""

    def begin(self) -> None:
        """Start observing."""

    def end(self) -> None:
        """Stop observing."""

    def said(self, steps: int) -> dict[str, Any]:
        """Return the measurements over this number of steps."""
        return {}


def run(case: Case, llm: Any, engine: Engine, watch: Watch | None = None) -> dict[str, Any]:
    """Run a case once and return its row.

    In engines with `skip_prefill` the prompts of a decode, and the contexts of a prefill after a context, are not
    computed, see `connector`.
    """
    watch, verified = watch or Watch(), Verified(llm, engine)
    loop = llm.llm_engine
    skipped = bool((case.decodes or case.new) and engine.skip_prefill)
    asked = _prompts(case, engine)
    names = [f"{next(_runs)} {number}" for number in range(case.batch)]
    counts, late = dict.fromkeys(names, 0), f"{next(_runs)} beside"
    if not case.decodes:
        watch.begin()
    began = time.perf_counter()
    for number, prompt in enumerate(asked):
        loop.add_request(names[number], prompt, _sampling(case, engine, skipped, number, prompt))
    first, at_first, steps, is_over = 0.0, 0, 0, False
    while loop.has_unfinished_requests() and not is_over and (skipped or steps < case.steps or not first):
        for out in loop.step():
            if out.request_id in counts:
                counts[out.request_id] = len(out.outputs[0].token_ids)
            is_over = is_over or out.request_id == late
        steps += bool(first)
        if not first and all(counts.values()):
            first, at_first = time.perf_counter(), sum(counts.values())
            if case.decodes:
                watch.begin()
            if case.beside:
                alone = Case(1, case.beside)
                (prompt,) = _prompts(alone, engine)
                names.append(late)
                loop.add_request(late, prompt, _sampling(alone, engine, False, 0, prompt))
    ended = time.perf_counter()
    watch.end()
    if loop.has_unfinished_requests():
        loop.abort_request(names)
    return _row(case, engine, began, first, ended, sum(counts.values()) - at_first, steps) | verified.share()


def _row(case: Case, engine: Engine, began: float, first: float, ended: float, made: int, steps: int) -> dict[str, Any]:
    about = {
        "case": case.name,
        "phase": _phase(case, engine),
        "backend": engine.backend,
        "page_size": engine.page_size,
        "num_gpus": engine.num_gpus,
        "drafts": engine.drafts,
        **engine.unusual,
        "acceptance": engine.acceptance,
    }
    if not case.decodes:
        return {**about, "tokens": case.computed, "tokens_per_s": round(case.computed / (first - began), 1)}
    each, tokens = 1000 * (ended - first) / max(1, steps), made + case.beside
    return {
        **about,
        "tokens": tokens,
        "tokens_per_s": round(tokens / (ended - first), 1),
        "steps": steps,
        "step_ms": round(each, 3),
    }


def _phase(case: Case, engine: Engine) -> str:
    if case.beside:
        return "mixed"
    return "prefill" if not case.steps else "verify" if engine.drafts else "decode"


def _mixed_steps(case: Case, engine: Engine) -> int:
    """Return the most steps that a prompt takes while other requests decode, including steps launched ahead."""
    if not case.beside:
        return 0
    chunk = engine.max_num_batched_tokens - case.batch * (1 + engine.drafts)
    return -(-case.beside // max(1, chunk)) + AHEAD


def _sampling(case: Case, engine: Engine, skipped: bool, number: int, prompt: dict[str, list[int]]) -> Any:
    """Return the sampling parameters of one request.

    With n-gram drafts that are all accepted, the only token allowed is the first of the prompt. A random model's own
    token is hardly ever one of the prompt's 32 tokens, and look-up would then find no drafts: the next steps would
    verify nothing, in some engines more often than in others.
    """
    from vllm import SamplingParams

    from .connector import there

    alone = case.uneven and number % 2 == 1
    # Prompts are computed one after another while the first requests already decode. The first requests get additional
    # tokens (`ahead`), so that none ends before the last timed step.
    computed = 0 if skipped or not case.steps else case.batch * case.context
    ahead = 2 + 5 * computed // (4 * engine.max_num_batched_tokens) if computed else 0
    drawn = engine.acceptance is not None and not alone  # then a step may commit all of its drafts
    look_up = drawn and engine.acceptance == 1 and engine.drafter == "ngram"
    return SamplingParams(
        temperature=0,
        max_tokens=1 + (case.steps + _mixed_steps(case, engine) + ahead) * (1 + engine.drafts if drawn else 1),
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=prompt["prompt_token_ids"][:1] if look_up else None,
        extra_args=there(case.new or 1) if skipped else None,
    )


_runs = itertools.count()
"""Numbers of request names. No name is reused, because steps of an aborted request may still run."""
_made: dict[tuple[Case, int], list[dict[str, list[int]]]] = {}


def _prompts(case: Case, engine: Engine) -> list[dict[str, list[int]]]:
    period = PERIOD if engine.drafts and case.decodes and engine.drafter == "ngram" else 0
    if (case, period) not in _made:
        vocabulary = SHAPES[engine.shape]["vocab_size"]
        found = prompts(case.batch, case.context + case.new, vocabulary, period)
        if case.uneven:
            found[1::2] = prompts(case.batch, case.context, vocabulary)[1::2]
        _made[case, period] = found
    return _made[case, period]


def phases(engine: Engine) -> tuple[str, ...]:
    """Return the phases that an engine can be timed in."""
    return ("verify", "mixed") if engine.drafts else ("decode", "prefill", "mixed")


def warm(cases: dict[str, list[Case]], llm: Any, engine: Engine) -> None:
    """Run each of an engine's cases once, briefly, because kernels compile at their first call."""
    if engine.drafts and engine.drafter == "dflash":
        llm.collective_rpc(make_confident)
    settle(llm, engine)
    _run_each(cases, llm, engine, 4)


def settled_costs(cases: dict[str, list[Case]], llm: Any, engine: Engine) -> dict[str, Any]:
    """Measure the costs of adaptive verification while no other engine runs, then run each of the engine's cases once.

    Every 100 steps vLLM estimates how many drafts are accepted (`OnlineAcceptanceEstimator`); before the first estimate
    it verifies all of them. It compiles the kernels that estimate acceptance and cut drafts at their first use.
    """
    found = measure_again(llm, engine)
    _run_each(cases, llm, engine, None)
    return found


def _run_each(cases: dict[str, list[Case]], llm: Any, engine: Engine, most: int | None) -> None:
    """Run each case of an engine once, with at most `most` steps, except long prefills."""
    for phase in phases(engine):
        for case in cases.get(phase, ()):
            if case.asked_of(engine) and not case.is_long:
                run(case if most is None else replace(case, steps=min(case.steps, most)), llm, engine)


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the repetition with the median speed; `all` has the speeds of all repetitions of the case."""
    ordered = sorted(rows, key=lambda row: float(row["tokens_per_s"]))
    return {**ordered[len(ordered) // 2], "all": [row["tokens_per_s"] for row in rows]}
