"""Comparison of the texts of several engines over one small trained model.

`memorizer` trains the model until its best logit is far ahead of the next, unlike the logits of a random model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .engines import Engine

NEW_TOKENS = 96


def texts(folder: Path, llm: Any, engine: Engine) -> list[list[int]]:
    """Return the new tokens for every prompt of the engine's checkpoint, which lies in a folder of models."""
    assert engine.checkpoint is not None, "texts need a trained model; set the engine's checkpoint"
    asked = [{"prompt_token_ids": one} for one in json.loads((folder / engine.checkpoint / "prompts.json").read_text())]
    sampling = [engine.sampling(number, NEW_TOKENS) for number in range(len(asked))]
    return [list(out.outputs[0].token_ids) for out in llm.generate(asked, sampling, use_tqdm=False)]


def compare(ours: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Count equal texts, and list the first position at which each other text differs."""
    parts = []
    for one, other in zip(ours, theirs, strict=True):
        at = next((n for n, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), None)
        if at is not None:
            parts.append(at)
    return {"texts": len(ours), "equal": len(ours) - len(parts), "part_at": parts}
