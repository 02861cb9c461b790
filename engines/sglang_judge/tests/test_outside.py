"""Tests of targets from outside of SGLang: classes of other packages, and names that plugins register."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftmark.errors import DraftmarkError
from draftmark_sglang_judge import outside
from draftmark_sglang_judge.engine import ENGINE

STRANGER = '''
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend


class Scaled(TorchNativeAttnBackend):
    """SGLang's torch backend with a planted fault in decodes."""

    def forward_decode(self, q, *given, **more):
        return super().forward_decode(q * 0.9, *given, **more)


def register():
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend("stranger")(Scaled)
'''
MATCH = "numerics.match_float64[page16-{}]"


def test_class_paths_are_targets() -> None:
    """A class path is a target on any device; other text is none."""
    for named in ("my_package.attention.MyBackend", "my_package.attention:MyBackend"):
        info = ENGINE.resolve(named)
        assert info is not None and info.any_device and info.name == named
    assert ENGINE.resolve("not a name") is None


def test_plugins_load_only_for_targets_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's own backends run without plugins. Others run with the installed ones, or those that the user selects."""
    monkeypatch.setattr(outside, "plugins", lambda: ["one", "two"])
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert ENGINE.environment("triton", "cuda:0")["SGLANG_PLUGINS"] == "none"
    assert ENGINE.environment("stranger", "cuda:0")["SGLANG_PLUGINS"] == "one,two"
    monkeypatch.setenv("SGLANG_PLUGINS", "two")
    assert ENGINE.environment("stranger", "cuda:0")["SGLANG_PLUGINS"] == "two"


def test_class_that_cannot_be_imported_is_an_error() -> None:
    """The error names the class and the exception of its import."""
    with pytest.raises(DraftmarkError, match="no_such_package:Backend gives no backend: ModuleNotFoundError"):
        outside.find("no_such_package:Backend", "cuda")


@pytest.mark.parametrize("named", ["json:JSONDecoder", "math:pi"])
def test_class_of_another_kind_is_an_error(named: str) -> None:
    """A class without SGLang's interface is an error, not a failed backend. The error says what to name."""
    pytest.importorskip("sglang")
    with pytest.raises(DraftmarkError, match="derive from SGLang's AttentionBackend; name the class of a backend"):
        outside.find(named, "cpu")


def test_fault_of_a_plugins_backend_is_found(tmp_path: Path) -> None:
    """A plugin's backend is judged under its name. Its fault in decodes is found. Draft steps have a reason."""
    pytest.importorskip("sglang")
    (tmp_path / "stranger.py").write_text(STRANGER)
    info = tmp_path / "stranger-1.5.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.5\n")
    (info / "top_level.txt").write_text("stranger\n")
    (info / "entry_points.txt").write_text("[sglang.srt.plugins]\nstranger = stranger:register\n")
    chosen = [MATCH.format("extend"), MATCH.format("decode"), "numerics.match_float64[page16-chain-draft]"]
    command = [sys.executable, "-m", "draftmark_tools.cli", "judge", "sglang:stranger", "--limit", "200"]
    command += [word for item in chosen for word in ("--item", item)]
    path = os.pathsep.join(filter(None, [str(tmp_path), *sys.path]))
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "stranger.Scaled of stranger 1.5" in done.stdout, done.stdout + done.stderr
    assert ": 1 passed, 0 refused, 0 declared, 1 unjudged, 1 failed" in done.stdout
    assert "broken rules: 22" in done.stdout
    assert f"{MATCH.format('decode')}\n" in done.stdout and f"1 x {outside.DRAFTS}" in done.stdout
