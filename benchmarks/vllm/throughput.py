"""Tokens a second of prefill, decode and verify, step by step through vLLM's own loop."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass, replace
from typing import Any

from draftmark import DTYPE_BYTES

from .engines import KV_DTYPES, Engine, prompts
from .shapes import SHAPES

LONG_PREFILL = 1 << 14
"""Tokens of a prefill from which on it is timed once, and not warmed up apart."""
SPARE = 64
"""Tokens of a request's last page, and of drafts that are looked at beyond its last step."""
AHEAD = 6
"""Steps that an engine may have begun before its host knows of a first token, twice."""
PERIOD = 32
"""Tokens after which the prompts of n-gram cases begin again."""


@dataclass(frozen=True)
class Case:
    """Requests that begin together.

    Attributes:
        steps: decode or verify steps to time; 0 times the prefill alone.
        new: of a prefill, tokens of each request behind its context, which is there; 0: its context is computed.
        beside: of mixed steps, tokens of a prompt that comes when all requests decode. What is timed is until its first
            token.
        uneven: every other prompt never repeats itself, so that steps have requests with n-gram drafts and without.
        turns: how often it is timed; 0 for as often as the others.
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
        """As in ``64x1k``, ``8x8k+64``, or ``64x1k-beside-8k``."""
        behind = (f"+{self.new}" if self.new else "") + (f"-beside-{self.beside // 1024}k" if self.beside else "")
        return f"{self.batch}x{self.context // 1024}k" + behind + ("-uneven" if self.uneven else "")

    @property
    def computed(self) -> int:
        """Tokens of prompts that are computed while it is timed."""
        return self.beside or self.batch * (self.new or self.context)

    @property
    def decodes(self) -> bool:
        """Whether requests decode while it is timed; else it is a prefill."""
        return bool(self.steps or self.beside)

    @property
    def is_long(self) -> bool:
        """Whether it is a prompt's time that is taken, and that is long."""
        return not self.steps and self.computed > LONG_PREFILL

    def asked_of(self, engine: Engine) -> bool:
        """Whether an engine of this phase is asked: a head drafts for every request, so its steps are never uneven; and
        a context is there only for engines that can skip it.
        """
        if self.uneven and (not engine.drafts or engine.drafter != "ngram"):
            return False
        if (self.new or self.beside) and not engine.skip_prefill:
            return False
        return fits(self, engine) and (not engine.only or self.name in engine.only)


def fits(case: Case, engine: Engine) -> bool:
    """Whether the engine's pages hold all requests of a case at once."""
    steps = case.steps or _mixed_steps(case, engine)
    tokens = case.batch * (case.context + case.new + steps * (1 + engine.drafts) + SPARE) + case.beside
    return engine.kv_bytes is None or tokens * token_bytes(engine) <= engine.kv_bytes


def token_bytes(engine: Engine) -> int:
    """KV of one token of a model that is timed, of a head's layer too, on one device."""
    shape = SHAPES[engine.shape]
    layers = shape["num_hidden_layers"] + (engine.drafts > 0 and engine.drafter != "ngram")
    each = DTYPE_BYTES[KV_DTYPES[engine.kv_dtype]]
    return 2 * each * shape["num_key_value_heads"] * shape["head_dim"] * layers // engine.num_gpus


class Watch:
    """Something that watches what of a case is timed: a prefill up to its last first token, or the steps behind it."""

    def begin(self) -> None:
        """It begins."""

    def end(self) -> None:
        """It has ended."""

    def said(self, steps: int) -> dict[str, Any]:
        """What was seen, of as many steps."""
        return {}


def run(case: Case, llm: Any, engine: Engine, watch: Watch | None = None) -> dict[str, Any]:
    """Run a case once. Prompts of a decode, and contexts of a prefill behind them, count as computed where the engine
    can skip that, see `connector`.
    """
    watch = watch or Watch()
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
    return _row(case, engine, began, first, ended, sum(counts.values()) - at_first, steps)


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
    """Steps that a prompt beside decodes takes at most, those of an engine that is ahead of its host among them."""
    if not case.beside:
        return 0
    chunk = engine.max_num_batched_tokens - case.batch * (1 + engine.drafts)
    return -(-case.beside // max(1, chunk)) + AHEAD


def _sampling(case: Case, engine: Engine, skipped: bool, number: int, prompt: dict[str, list[int]]) -> Any:
    """One request's. The token behind n-gram drafts that are all accepted is one that its prompt goes on from.

    A random model's own token is hardly ever one of the prompt's 32, and then there is nothing to look up: the next
    steps would verify nothing, in some engines more than in others.
    """
    from vllm import SamplingParams

    from .connector import there

    alone = case.uneven and number % 2 == 1
    # Where prompts are computed one after another, the first requests decode meanwhile; none ends before the last step.
    computed = 0 if skipped or not case.steps else case.batch * case.context
    ahead = 2 + 5 * computed // (4 * engine.max_num_batched_tokens) if computed else 0
    all_accepted = engine.acceptance == 1 and not alone
    return SamplingParams(
        temperature=0,
        max_tokens=1 + (case.steps + _mixed_steps(case, engine) + ahead) * (1 + engine.drafts if all_accepted else 1),
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=prompt["prompt_token_ids"][:1] if all_accepted and engine.drafter == "ngram" else None,
        extra_args=there(case.new or 1) if skipped else None,
    )


_runs = itertools.count()
"""Names of requests are never used again: steps of one that was ended may be under way."""
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
    """What an engine can be timed in."""
    return ("verify", "mixed") if engine.drafts else ("decode", "prefill", "mixed")


def warm(cases: dict[str, list[Case]], llm: Any, engine: Engine) -> None:
    """Run each of an engine's cases once, briefly: kernels compile at their first call."""
    for phase in phases(engine):
        for case in cases.get(phase, ()):
            if case.asked_of(engine) and not case.is_long:
                run(replace(case, steps=min(case.steps, 4)), llm, engine)


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of repetitions of one case: the median speed, and every one of them."""
    ordered = sorted(rows, key=lambda row: float(row["tokens_per_s"]))
    return {**ordered[len(ordered) // 2], "all": [row["tokens_per_s"] for row in rows]}
