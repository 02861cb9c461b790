"""Sources of FlashInfer's releases for drift tests: wheels in a folder, and the installed package.

`make engines` downloads the wheels and sets `DRAFTMARK_FLASHINFER_WHEELS` to their folder.
"""

from __future__ import annotations

import importlib.metadata as md
import os
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

VARIABLE = "DRAFTMARK_FLASHINFER_WHEELS"


@dataclass(frozen=True)
class FlashInferRelease:
    """Holds one release's version and the root of its package `flashinfer`."""

    version: str
    root: Path | zipfile.Path

    def read(self, file: str) -> str:
        """Return the text of a file of the package, by its path in the package."""
        return self.root.joinpath(file).read_text(encoding="utf-8")


def flashinfer_releases(accepted: Sequence[str]) -> list[FlashInferRelease]:
    """Return the installed release, and each accepted release that has a wheel in the folder."""
    found = []
    try:
        installed = md.distribution("flashinfer-python")
    except md.PackageNotFoundError:
        pass
    else:
        found.append(FlashInferRelease(installed.version, Path(str(installed.locate_file("flashinfer")))))
    for version in accepted if VARIABLE in os.environ else ():
        for wheel in Path(os.environ[VARIABLE]).glob(f"flashinfer_python-{version}-*.whl"):
            found.append(FlashInferRelease(version, zipfile.Path(wheel, "flashinfer/")))
    return found


def each_flashinfer_release(accepted: Sequence[str]) -> pytest.MarkDecorator:
    """Return a pytest mark that runs a test once for each release. The test's argument `release` reads its files."""
    found = [pytest.param(one, id=one.version) for one in flashinfer_releases(accepted)]
    absent = pytest.mark.skip(f"flashinfer-python is not installed, and {VARIABLE} names no folder of wheels")
    return pytest.mark.parametrize("release", found or [pytest.param(None, marks=absent)])
