"""Tokens a second of prefill, decode and verify, step by step through vLLM's own loop."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .engines import SHAPES, Engine, prompts

PERIOD = 32
"""Tokens after which the prompts of n-gram cases begin again."""


@dataclass(frozen=True)
class Case:
    """Requests that begin together. warm: runs before the one that counts."""

    batch: int
    context: int
    new_tokens: int
    warm: int = 1

    @property
    def name(self) -> str:
        """As in ``64x1k``."""
        return f"{self.batch}x{self.context // 1024}k"


def measure(cases: list[Case]) -> Any:
    """Return the work of one engine's process: rows of every case."""

    def work(engine: Engine, folder: Path) -> list[dict[str, Any]]:
        from vllm import LLM

        began = time.monotonic()
        llm = LLM(**engine.arguments(folder))
        start = round(time.monotonic() - began, 1)
        rows = []
        for case in cases:
            for _ in range(case.warm):
                _run(llm, engine, case)
            rows += _run(llm, engine, case)
        return [{**row, "engine_start_s": start} for row in rows]

    return work


def _run(llm: Any, engine: Engine, case: Case) -> list[dict[str, Any]]:
    """One pass: until every request has its first token it prefills, from then on it decodes."""
    from vllm import SamplingParams

    loop = llm.llm_engine
    sampling = SamplingParams(temperature=0, max_tokens=case.new_tokens, ignore_eos=True, detokenize=False)
    vocabulary = SHAPES[engine.shape]["vocab_size"]
    asked = prompts(case.batch, case.context, vocabulary, PERIOD if engine.drafts else 0)
    counts = {str(number): 0 for number in range(case.batch)}
    began = time.perf_counter()
    for number, prompt in enumerate(asked):
        loop.add_request(str(number), prompt, sampling)
    first, at_first, steps = 0.0, 0, 0
    while loop.has_unfinished_requests():
        for out in loop.step():
            counts[out.request_id] = len(out.outputs[0].token_ids)
        steps += bool(first)
        if not first and all(counts.values()):
            first, at_first = time.perf_counter(), sum(counts.values())
    ended, made = time.perf_counter(), sum(counts.values()) - at_first
    common = {
        "case": case.name,
        "backend": engine.backend,
        "page_size": engine.page_size,
        "num_gpus": engine.num_gpus,
        "drafts": engine.drafts,
    }
    tokens = case.batch * case.context
    return [
        {**common, "phase": "prefill", "tokens_per_s": round(tokens / (first - began), 1), "tokens": tokens},
        {
            **common,
            "phase": "verify" if engine.drafts else "decode",
            "tokens_per_s": round(made / (ended - first), 1),
            "tokens": made,
            "steps": steps,
        },
    ]
