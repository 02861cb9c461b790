"""What is shipped: files that load, within the size that was promised."""

from __future__ import annotations

import json
from pathlib import Path

from draftmark_speculative.eagle import DraftHead

FOLDER = Path(__file__).parents[1] / "src" / "draftmark_head_smollm2_135m"


def test_the_head_loads_and_is_at_most_10_mib():
    """Weights are bfloat16 in the file; nothing but the draft vocabulary is an integer."""
    head = DraftHead.load(FOLDER)
    assert head.config.target.startswith("SmolLM2-135M-Instruct")
    assert (FOLDER / "head.safetensors").stat().st_size <= 10 * 2**20
    assert len(head.d2t) == head.config.draft_vocab_size


def test_its_origin_is_told():
    """Seed, text and candidates of the training run are in the package."""
    training = json.loads((FOLDER / "training.json").read_text())
    assert training["plan"]["seed"] == 0
    assert training["text"]["answer_tokens"] > 1_000_000
    assert training["chosen"]["features"] == json.loads((FOLDER / "head.json").read_text())["feature_layers"]
