"""What drafts give: tokens a round and a second of one small model, with drafts of one kind or another.

The model is one whose texts and head are real (`smollm2`), so that what is accepted is; its prompts begin together.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from .engines import Engine

NEW_TOKENS = 128


def drafted(folder: Path, llm: Any, engine: Engine) -> dict[str, Any]:
    """Continue every prompt of the engine's checkpoint, and count.

    Returns:
        The tokens; of all steps behind the last first token tokens a second and milliseconds a step, and of each
        request's steps with an output the mean number of tokens.
    """
    assert engine.checkpoint is not None, "drafts that are accepted need a trained model"
    prompts = json.loads((folder / engine.checkpoint / "prompts.json").read_text())
    loop = llm.llm_engine
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
    }
