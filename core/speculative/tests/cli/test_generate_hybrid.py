"""`draftmark generate` on models with recurrent state, and its errors for models and backends without support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftmark_reference import ReferencePlugin

Run = Callable[..., Any]
Save = Callable[..., Path]

PROMPTS = ("--prompt-ids", "1,2,3,4,1,2,3", "--prompt-ids", "7,5", "--max-new-tokens", 16)


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Return a function from a family to the folder of a tiny model with 16 tokens."""
    from draftmark_speculative.models.tiny import tiny_hf_model

    def folder(family: str, **overrides: Any) -> Path:
        path = tmp_path_factory.mktemp("models") / f"tiny-{family}"
        tiny_hf_model(family, vocab_size=16, **overrides).save_pretrained(path)
        return path

    return folder


@pytest.mark.parametrize(
    ("family", "argv"),
    [
        ("qwen3_5_text", ("--topk", 2, "--num-draft-tokens", 6, "--graph")),
        ("granitemoehybrid", ("--topk", 1, "--num-draft-tokens", 4, "--page-size", 1)),
        ("nemotron_h", ("--speculate", "adaptive", "--drafts", "ngram", "--topk", 2)),
        ("lfm2", ("--dtype", "bfloat16", "--graph")),
    ],
)
def test_check_finds_the_same_text(draftmark: Run, save: Save, family: str, argv: tuple[object, ...]) -> None:
    """Drafts on a model with state give plain decoding's text and transformers' own, without warnings on stderr."""
    done = draftmark("generate", "--model", save(family), *PROMPTS, "--check", "--json", *argv)
    assert done.code == 0, done.err
    assert done.json["check"]["differing"] == 0
    assert "falling back" not in done.err


def test_limited_time_steps_are_compared_without_a_cache(draftmark: Run, save: Save) -> None:
    """transformers ignores the time step's limit in one-row forwards, so --check compares whole forwards."""
    folder = save("nemotron_h", time_step_min=0.05)
    done = draftmark("generate", "--model", folder, *PROMPTS, "--check", "--json")
    assert done.code == 0, done.err


def test_model_that_is_not_served_is_one_sentence(draftmark: Run, tmp_path: Path) -> None:
    """A family that draftmark cannot decode ends with its reason and with families that it can decode."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    AutoConfig.for_model("jamba").save_pretrained(tmp_path / "jamba")
    save_file({}, tmp_path / "jamba" / "model.safetensors")
    done = draftmark("generate", "--model", tmp_path / "jamba", "--prompt-ids", "1,2")
    assert done.code == 1
    error = done.err.splitlines()[-1]
    assert "model 'jamba' (family jamba) cannot be decoded: its Mamba1 layers have one decay for each" in error
    assert error.endswith("or a model with attention layers only")


def test_backend_without_state_is_one_sentence(draftmark: Run, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that serves no recurrent state is refused by name before the first token."""
    monkeypatch.setattr(ReferencePlugin, "info", replace(ReferencePlugin.info, recurrences=()))
    done = draftmark("generate", "--model", save("lfm2"), *PROMPTS)
    assert done.code == 1
    refused = "backend 'reference' does not serve this geometry: recurrence none is not served: "
    error = done.err.splitlines()[-1]
    assert refused in error and error.endswith("use a backend that lists it, such as reference")
