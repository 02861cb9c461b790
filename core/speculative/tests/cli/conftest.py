"""Fixtures for the command line: tiny models on disk."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama without a tokenizer. With 16 tokens n-grams repeat, so drafts are accepted."""
    from draftmark_speculative.models.tiny import tiny_hf_model

    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_hf_model("llama", vocab_size=16).save_pretrained(path)
    return path
