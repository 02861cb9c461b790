"""`draftmark generate --speculate eagle` with a named head and with an installed head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

Run = Callable[..., Any]


@pytest.fixture(scope="session")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random head for the tiny model of 16 tokens."""
    from draftmark_speculative import DraftHead
    from draftmark_speculative.eagle import HeadConfig

    path = tmp_path_factory.mktemp("heads") / "tiny"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        DraftHead(HeadConfig(48, 16, 4, 2, 12, 96, (1, 2), target="tiny-llama")).save(path)
    return path


@pytest.fixture
def generate(draftmark: Run, tiny: Path) -> Run:
    """Return a function that decodes two prompts on the tiny model with EAGLE drafts and --check."""

    def run(*argv: object) -> Any:
        prompts = ("--prompt-ids", "1,2,3,4", "--prompt-ids", "7,5", "--max-new-tokens", 20)
        return draftmark("generate", "--model", tiny, *prompts, "--speculate", "eagle", "--check", "--json", *argv)

    return run


@pytest.mark.parametrize(
    "argv", [(), ("--topk", 1, "--num-draft-tokens", 5), ("--graph", "--overlap"), ("--temperature", 1, "--overlap")]
)
def test_check_finds_the_same_text(generate: Run, head: Path, argv: tuple[object, ...]) -> None:
    """EAGLE drafts give the text of plain decoding with trees, chains, graphs, overlap and sampling."""
    done = generate("--head", head, *argv)
    assert done.code == 0, done.err
    assert done.json["check"]["differing"] == 0
    assert done.json["totals"]["mean_accepted_length"] > 1
    assert done.json["config"]["overlap"] == ("--overlap" in argv)


@pytest.mark.parametrize(
    "argv",
    [
        ("--num-steps", 3, "--graph", "--overlap", "--max-num-reqs", 1),
        ("--drafts", "eagle", "--topk", 1, "--num-draft-tokens", 5, "--temperature", 1),
        ("--drafts", "ngram", "--num-draft-tokens", 4, "--graph"),
    ],
)
def test_adaptive_drafting_finds_the_same_text(generate: Run, head: Path, argv: tuple[object, ...]) -> None:
    """Adaptive drafting with a head or n-grams, at measured costs, gives the text of plain decoding."""
    named = () if "ngram" in argv else ("--head", head)
    done = generate("--speculate", "adaptive", *named, *argv)
    assert done.code == 0, done.err
    assert done.json["check"]["differing"] == 0
    assert done.json["totals"]["rows"] >= done.json["totals"]["rounds"] > 0
    assert "drafts" in done.json["config"]["speculate"]


def test_the_installed_head_is_the_default(
    generate: Run, head: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --head, `generate` uses an installed head that is registered for the model."""
    package = tmp_path / "head_of_tiny"
    package.mkdir()
    for file in head.iterdir():
        (package / file.name).write_bytes(file.read_bytes())
    info = tmp_path / "head_of_tiny-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: head-of-tiny\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[draftmark.heads.v1]\nTiny-Llama = head_of_tiny\n")
    monkeypatch.syspath_prepend(tmp_path)
    done = generate()
    assert done.code == 0, done.err
    assert done.json["config"]["speculate"] == {"head": None, "topk": 4, "num_steps": 4, "num_draft_tokens": 16}


def test_a_head_of_another_model_is_refused(draftmark: Run, head: Path, tmp_path: Path) -> None:
    """A head for another model is rejected before any token; the error names both models."""
    from draftmark_speculative.models.tiny import tiny_hf_model

    tiny_hf_model("llama", vocab_size=32).save_pretrained(tmp_path / "other")
    model = ("--model", tmp_path / "other", "--prompt-ids", "1,2")
    done = draftmark("generate", *model, "--speculate", "eagle", "--head", head)
    assert done.code == 1
    assert "vocab_size is 16 (it was trained for tiny-llama), but model 'other' has 32" in done.err
