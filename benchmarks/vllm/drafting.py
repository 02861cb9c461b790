"""Tokens per round and tokens/s of one small model with different kinds of drafts.

The model and its draft head are trained (`smollm2`), so the acceptance rates are realistic. All prompts start together.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from .confident import Verified
from .engines import Engine

NEW_TOKENS = 128


def drafted(folder: Path, llm: Any, engine: Engine) -> dict[str, Any]:
    """Continue every prompt of the engine's checkpoint, and measure.

    Returns:
        ``tokens``: new tokens of each prompt. ``tokens_per_s`` and ``step_ms``: over all steps after the step in which
        the last request gets its first token. ``tokens_per_round``: mean number of tokens of a request's steps that
        output any. ``rounds``: number of these steps. ``verified``: share of the drafts that adaptive verification
        verified.
    """
    assert engine.checkpoint is not None, "drafts are accepted only with a trained model; set the engine's checkpoint"
    prompts = json.loads((folder / engine.checkpoint / "prompts.json").read_text())
    loop, verified = llm.llm_engine, Verified(llm, engine)
    for number, prompt in enumerate(prompts):
        loop.add_request(str(number), {"prompt_token_ids": prompt}, engine.sampling(number, NEW_TOKENS))
    tokens: dict[int, list[int]] = {}
    rounds, first, at_first, steps = 0, 0.0, 0, 0
    while loop.has_unfinished_requests():
        for out in loop.step():
            found, number = list(out.outputs[0].token_ids), int(out.request_id)
            rounds += len(found) > len(tokens.get(number, ())) > 0
            tokens[number] = found
        steps += bool(first)
        if not first and len(tokens) == len(prompts):
            first, at_first = time.perf_counter(), sum(map(len, tokens.values()))
    seconds, made = time.perf_counter() - first, sum(map(len, tokens.values()))
    return {
        "tokens": [tokens[number] for number in range(len(prompts))],
        "tokens_per_s": round((made - at_first) / seconds, 1),
        "step_ms": round(1000 * seconds / max(1, steps), 3),
        "tokens_per_round": round((made - len(prompts)) / rounds, 3),
        "rounds": rounds,
        **verified.share(),
    }
