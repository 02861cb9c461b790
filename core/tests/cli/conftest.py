"""Shared fixtures: the command line in this process, tiny models on disk, and plugins made of text."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from draftmark.cli import main

COMPLETE = """
from draftmark.reference import *
from draftmark import hookimpl
from draftmark.hookspecs import BackendInfo
@hookimpl
def draftmark_describe():
    return BackendInfo(name={name!r}, device={device!r}, contract_minor=0, host_kernels=False, runtime={runtime!r})
"""


@dataclass(frozen=True)
class Outcome:
    """What a command line did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its output, read as one JSON object."""
        return json.loads(self.out)


@pytest.fixture
def draftmark(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run a command line in this process."""

    def run(*argv: object) -> Outcome:
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in a folder, without a tokenizer; of 16 tokens, so that n-grams come back and drafts pay."""
    from draftmark.speculative.models.tiny import tiny_hf_model

    path = tmp_path_factory.mktemp("models") / "tiny-llama"
    tiny_hf_model("llama", vocab_size=16).save_pretrained(path)
    return path


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a distribution with one backend first on the path; its module has the given source."""

    def installed(name: str, source: str | None = None, dist: str = "", group: str = "v1", **info: Any) -> Path:
        dist = dist or f"draftmark-{name}"
        folder = tmp_path / dist
        metadata = folder / f"{dist.replace('-', '_')}-1.2.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        module = f"plugin_{name}_{dist.replace('-', '_')}"
        (metadata / "entry_points.txt").write_text(f"[draftmark.backends.{group}]\n{name} = {module}\n")
        fields = {"device": "any", "runtime": ()} | info
        (folder / f"{module}.py").write_text(source or COMPLETE.format(name=name, **fields))
        # Another test of this process may have imported a backend of the same name.
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(folder)
        return folder

    return installed


@pytest.fixture
def broken_torch(tmp_path: Path) -> Path:
    """A folder whose `torch` raises on import."""
    folder = tmp_path / "broken-torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise RuntimeError('libascend_hal.so: cannot open shared object file')\n")
    return folder
