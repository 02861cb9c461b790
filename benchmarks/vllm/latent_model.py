"""A small DeepSeek V3 with predictable texts, and its prompts: the checkpoint ``latent`` of the text comparison."""

from __future__ import annotations

import json
import random
from pathlib import Path

LENGTHS = (7, 20, 64, 65, 130, 200, 320, 511)


def write(folder: Path, dtype: str = "bfloat16") -> None:
    """Write the model of `benchmarks.sglang.guessable_latent`, and one random prompt of each length."""
    from benchmarks.sglang.guessable import VOCABULARY
    from benchmarks.sglang.guessable_latent import write_latent

    write_latent(folder, dtype, plain=128, value=128)  # vLLM computes prompts of MLA for DeepSeek's own sizes only
    draw = random.Random(3)
    prompts = [[draw.randrange(2, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    (folder / "prompts.json").write_text(json.dumps(prompts))
