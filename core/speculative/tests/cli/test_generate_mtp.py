"""`draftmark generate` on a model with latent attention, with its MTP layer and with n-gram drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny DeepSeek V3 with an MTP layer."""
    from core.speculative.tests.mtp_files import write_mtp
    from draftmark_speculative.mtp.tiny import tiny_mtp_pair

    path = tmp_path_factory.mktemp("models") / "tiny-deepseek"
    model, head = tiny_mtp_pair("deepseek_v3")
    model.hf.save_pretrained(path)
    write_mtp(path, model, head)
    return path


@pytest.mark.parametrize(
    "argv",
    [
        ("--speculate", "mtp"),
        ("--speculate", "mtp", "--topk", 2, "--num-draft-tokens", 6, "--graph", "--overlap", "--page-size", 48),
        ("--speculate", "adaptive", "--drafts", "mtp", "--num-steps", 2),
        ("--speculate", "ngram", "--page-size", 1),
    ],
)
def test_check_finds_the_same_text(draftmark: Run, folder: Path, argv: tuple[object, ...]) -> None:
    """Drafts over latent rows give plain decoding's text, and transformers' own."""
    prompts = ("--prompt-ids", "1,2,3,4,1,2,3", "--prompt-ids", "7,5", "--max-new-tokens", 16)
    done = draftmark("generate", "--model", folder, *prompts, "--check", "--json", *argv)
    assert done.code == 0, done.err
    assert done.json["check"]["differing"] == 0
    assert done.json["totals"]["mean_accepted_length"] >= 1


def test_model_without_a_layer_is_refused(draftmark: Run, tiny: Path) -> None:
    """MTP drafts for a model without that layer raise one sentence with the missing tensors."""
    done = draftmark("generate", "--model", tiny, "--prompt-ids", "1,2", "--speculate", "mtp")
    assert done.code == 1
    assert "has no MTP drafts: its folder has no MTP layer (no tensor of layers.2); use a checkpoint" in done.err


def test_a_head_for_mtp_is_refused(draftmark: Run) -> None:
    """--head belongs to EAGLE drafts."""
    done = draftmark("generate", "--prompt-ids", "1,2", "--speculate", "mtp", "--head", "x")
    assert done.code == 2
    assert "--head is given with --speculate mtp; it belongs to eagle (--speculate eagle or --drafts eagle)" in done.err
