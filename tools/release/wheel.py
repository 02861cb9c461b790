"""Build of one distribution from a copy, and checks of its wheel."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .distributions import Distribution
from .publisher import PLACEHOLDER, filled
from .readme import for_index, relative_links

NOT_COPIED = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__", "emulator", ".*")


def release_copy(one: Distribution, folder: Path, repository: str = PLACEHOLDER) -> Path:
    """Copy a distribution into a new folder, with a README for package indexes and the repository's URLs."""
    copy = shutil.copytree(one.folder, folder, ignore=NOT_COPIED)
    readme, pyproject = copy / one.project["readme"], copy / "pyproject.toml"
    readme.write_text(for_index(readme.read_text(encoding="utf-8")), encoding="utf-8")
    pyproject.write_text(filled(pyproject.read_text(encoding="utf-8"), repository), encoding="utf-8")
    return copy


def build(one: Distribution, scratch: Path, dist: Path, repository: str = PLACEHOLDER) -> list[Path]:
    """Build a wheel and an sdist of a `release_copy` into `dist`.

    Raises:
        RuntimeError: the build failed; the message has its output.
    """
    copy = release_copy(one, scratch / one.name, repository)
    before = set(dist.glob("*"))
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{one.name} could not be built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return sorted(set(dist.glob("*")) - before)


def faults(wheel: Path) -> list[str]:
    """Return one sentence for each fault of a wheel that is to be published."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [path] = [name for name in names if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_bytes(archive.read(path))
    found = []
    if not any(".dist-info/licenses/LICENSE" in name for name in names):
        found.append("no licence")
    if not any(name.endswith("/py.typed") for name in names):
        found.append("no py.typed")
    for field in ("Classifier", "Project-URL", "Requires-Python", "License-Expression"):
        if not metadata.get_all(field):
            found.append(f"no {field}")
    links = relative_links(str(metadata.get_payload()))
    found += [f"a link in its README that does not work on an index: {link}" for link in links]
    return [f"{wheel.name} has {fault}" for fault in found]
