"""Shared fixtures: tiny models on disk."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder, without a tokenizer; of 16 tokens, so that n-grams come back and drafts pay."""
    from draftmark_speculative.models.tiny import tiny_hf_model

    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_hf_model("llama", vocab_size=16).save_pretrained(path)
    return path
