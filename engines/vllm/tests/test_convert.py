"""Tests of the program that converts a draft head to a folder for vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftmark_engines import EngineError
from draftmark_vllm.heads.convert import convert

HIDDEN, VOCABULARY, LAYERS = 8, 20, 3


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Return a target model's folder with the files that the converter reads."""
    path = tmp_path / "target"
    path.mkdir()
    config = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 64,
    }
    (path / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN), "model.norm.weight": torch.randn(HIDDEN)}
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """Return the folder of a draft head with a vocabulary of six of the target's tokens."""
    speculative = pytest.importorskip("draftmark_speculative.eagle.head")
    from draftmark_speculative.eagle.config import HeadConfig

    made = speculative.DraftHead(HeadConfig(HIDDEN, VOCABULARY, 2, 1, 4, 16, (1, LAYERS), draft_vocab_size=6))
    made.d2t = torch.tensor([0, 3, 4, 9, 10, 19])
    made.save(tmp_path / "head")
    return tmp_path / "head"


def test_head_is_written_with_vllms_names(head: Path, target: Path, tmp_path: Path) -> None:
    """The written folder has the head's weights, its output rows, the target's final norm, and token offsets."""
    convert(head, target, tmp_path / "out")
    written, own = load_file(tmp_path / "out/model.safetensors"), load_file(head / "head.safetensors")
    of_target = load_file(target / "model.safetensors")
    assert len(written) == len(own) + 2
    assert torch.equal(written["fc.weight"], own["feature_proj.weight"])
    assert torch.equal(written["layers.0.self_attn.k_proj.weight"], own["attention.k_proj.weight"])
    assert torch.equal(written["lm_head.weight"], of_target["model.embed_tokens.weight"][own["d2t"]])
    assert torch.equal(written["target_norm.weight"], of_target["model.norm.weight"])
    assert (written["d2t"] + torch.arange(6)).tolist() == own["d2t"].tolist()
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, LAYERS] and config["draftmark_normed_feature"] is True


def test_a_head_of_another_target_is_refused(head: Path, target: Path, tmp_path: Path) -> None:
    """If the head was trained for a target of another size, the error names both sizes."""
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "vocab_size": 21}))
    with pytest.raises(EngineError, match=r"hidden_size 8 and vocab_size 20, but .* has 8 and 21"):
        convert(head, target, tmp_path / "out")


def test_an_absent_file_is_named(head: Path, tmp_path: Path) -> None:
    """If a file is absent, the error names the file and the remedy."""
    with pytest.raises(EngineError, match=r"config.json does not exist; name a head's folder, then its target's"):
        convert(head, tmp_path, tmp_path / "out")


@pytest.mark.long
def test_help_needs_no_safetensors(tmp_path: Path) -> None:
    """Without the package safetensors (a dependency of vLLM) the program prints its help, or a one-sentence error."""
    (tmp_path / "safetensors.py").write_text("raise ModuleNotFoundError('absent', name='safetensors')\n")
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-m", "draftmark_vllm.heads.convert"]
    how = {"env": os.environ | {"PYTHONPATH": paths}, "capture_output": True, "text": True}
    assert subprocess.run([*command, "--help"], **how).returncode == 0
    done = subprocess.run([*command, "a", "b", "c"], **how)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.endswith("safetensors is not installed; pip install safetensors\n")
