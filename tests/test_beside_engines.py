"""Dry runs of pip: the packages can be installed next to the newest release of each engine.

pip reads metadata from PyPI and downloads no package. Versions of engines: `draftmark_vllm` and `draftmark_sglang` name
the ranges that the adapters support.
"""

from __future__ import annotations

import json
import venv
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from draftmark_cuda_flashinfer import version as flashinfer
from draftmark_cuda_trtllm import versions as xqa
from draftmark_sglang.versions import SUPPORTED as SGLANG
from draftmark_vllm.versions import VLLM
from tests.conftest import Wheels, run

PIP = "pip>=26"
"""A dry run of older releases downloads the packages."""
PACKAGES = (
    "draftmark-vllm", "draftmark-sglang", "draftmark-cuda-triton", "draftmark-cuda-flashinfer[runtime]",
    "draftmark-cuda-trtllm[runtime]", "draftmark-speculative[hf]", "draftmark-contract[torch]",
)  # fmt: skip


@pytest.fixture
def pip(tmp_path: Path) -> Path:
    """Return the Python of an environment with a pip that resolves from metadata."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    if run(python, "-m", "pip", "install", "--quiet", "--upgrade", PIP).returncode:
        pytest.skip(f"pip finds no {PIP} here")
    return python


@pytest.mark.long
@pytest.mark.parametrize("engine", ["vllm==0.33.0", "sglang==0.5.23"])
def test_packages_install_beside_the_engine(engine: str, pip: Path, wheels: Wheels, tmp_path: Path) -> None:
    """pip finds versions of all requirements of the engine, both adapters and every CUDA plugin together."""
    name, _, version = engine.partition("==")
    supported = {"vllm": VLLM, "sglang": SGLANG}[name]
    assert SpecifierSet(f">={supported.oldest},<{supported.below}").contains(version)
    folder, report = wheels["draftmark-core"].parent, tmp_path / "report.json"
    done = run(
        pip, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--only-binary=:all:",
        "--find-links", folder, "--report", report, engine, *PACKAGES,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(report.read_text())["install"]}
    assert found[name] == version
    assert found["flashinfer-python"] in flashinfer.ACCEPTED and found["flashinfer-python"] in xqa.ACCEPTED
    shown = {one: found[one] for one in ("torch", "triton", "transformers", "flashinfer-python")}
    print(engine, shown)
