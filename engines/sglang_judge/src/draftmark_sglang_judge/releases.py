"""Download of SGLang releases, each to its own folder, with the transformers version that it requires.

Only these wheels are downloaded. torch and all other dependencies come from the environment.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from draftmark.errors import DraftmarkError

VARIABLE = "DRAFTMARK_RELEASES"
"""Environment variable with the folder of all releases."""
TOKENIZERS = {"5.19": ">=0.23.1,<0.24"}
"""tokenizers version for a transformers version that starts so. Older transformers versions take `OLDER`."""
OLDER = ">=0.22,<=0.23.0"
TRITON = "3.7.1"
"""Release of Triton with block pointers, which SGLang's kernels use. Triton 3.9 has removed them."""


def folder_of(release: str) -> Path:
    """Return the folder for a release. The folder exists only after `prepare`."""
    home = os.environ.get(VARIABLE) or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "draftmark"
    return Path(home) / f"sglang-{release}"


def prepare(release: str) -> None:
    """Download a release unless its folder exists.

    Raises:
        DraftmarkError: `release` is not a version number, or pip cannot download it.
    """
    if not re.fullmatch(r"\d+(\.\d+)*(\.post\d+|rc\d+)?", release):
        raise DraftmarkError(f"release {release!r} is not a version; write a version of PyPI, e.g. 0.5.12.post1")
    folder = folder_of(release)
    if folder.exists():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        _install(scratch, f"sglang=={release}")
        transformers = _requirement(Path(scratch), f"sglang-{release}", "transformers")
        if transformers:
            _install(scratch, transformers)
            version = transformers.partition("==")[2]
            taken = next((spec for start, spec in TOKENIZERS.items() if version.startswith(start)), OLDER)
            _install(scratch, f"tokenizers{taken}")
        Path(scratch).rename(folder)
        Path(scratch).mkdir()  # After the rename the folder is gone, but `TemporaryDirectory` must find one to remove.


def triton_folder() -> Path:
    """Return a folder with `TRITON`, a release with an interpreter for SGLang's kernels of recurrent state.

    Raises:
        DraftmarkError: pip cannot download it.
    """
    folder = folder_of("").with_name(f"triton-{TRITON}")
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            _install(scratch, f"triton=={TRITON}")
            Path(scratch).rename(folder)
            Path(scratch).mkdir()
    return folder


def _requirement(folder: Path, distribution: str, name: str) -> str:
    """Return the pinned requirement in a distribution's metadata, e.g. ``"transformers==5.6.0"``; "" for none."""
    metadata = (folder / f"{distribution}.dist-info" / "METADATA").read_text(encoding="utf-8")
    found = re.search(rf"^Requires-Dist: ({name}==[\w.]+)\s*$", metadata, re.MULTILINE)
    return found.group(1) if found else ""


def _install(folder: str, requirement: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--target", folder, requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["pip printed no error"]
        raise DraftmarkError(f"pip could not download {requirement}: {last[0]}; check --release and the network")
