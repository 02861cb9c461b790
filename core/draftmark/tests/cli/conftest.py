"""Shared fixtures: plugins made of text, and a torch that cannot be imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMPLETE = """
from draftmark.reference import *
from draftmark import hookimpl
from draftmark.hookspecs import BackendInfo
@hookimpl
def draftmark_describe():
    return BackendInfo(name={name!r}, device={device!r}, contract_minor=0, host_kernels=False, runtime={runtime!r})
"""


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
