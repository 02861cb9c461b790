"""Shipped files of the head: they load, they are small, and they state their origin."""

from __future__ import annotations

import json
from pathlib import Path

from draftmark_speculative.eagle import DraftHead

FOLDER = Path(__file__).parents[1] / "src" / "draftmark_head_smollm2_135m"


def test_the_head_loads_and_is_at_most_10_mib():
    """The shipped head loads, and its weights file is at most 10 MiB."""
    head = DraftHead.load(FOLDER)
    assert head.config.target.startswith("SmolLM2-135M-Instruct")
    assert (FOLDER / "head.safetensors").stat().st_size <= 10 * 2**20
    assert len(head.d2t) == head.config.draft_vocab_size


def test_package_states_the_training_run():
    """The package contains seed, text size and chosen candidate of the training run."""
    training = json.loads((FOLDER / "training.json").read_text())
    assert training["plan"]["seed"] == 0
    assert training["text"]["answer_tokens"] > 1_000_000
    assert training["chosen"]["features"] == json.loads((FOLDER / "head.json").read_text())["feature_layers"]
