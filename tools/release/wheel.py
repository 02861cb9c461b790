"""Builds one distribution from a copy, and looks into the wheel that comes out."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .distributions import Distribution
from .readme import for_index, relative_links

NOT_COPIED = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__", "emulator", ".*")


def build(one: Distribution, scratch: Path, dist: Path) -> list[Path]:
    """Its wheel and its sdist in `dist`, built from a copy whose README an index can show.

    Raises:
        RuntimeError: the build failed; the message is its output.
    """
    copy = shutil.copytree(one.folder, scratch / one.name, ignore=NOT_COPIED)
    readme = copy / one.project["readme"]
    readme.write_text(for_index(readme.read_text(encoding="utf-8")), encoding="utf-8")
    before = set(dist.glob("*"))
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(copy))
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{one.name} could not be built:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return sorted(set(dist.glob("*")) - before)


def faults(wheel: Path) -> list[str]:
    """One sentence for each thing that a published wheel must have and this one lacks."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        [path] = [name for name in names if name.endswith(".dist-info/METADATA")]
        told = email.message_from_bytes(archive.read(path))
    found = []
    if not any(".dist-info/licenses/LICENSE" in name for name in names):
        found.append("no licence")
    if not any(name.endswith("/py.typed") for name in names):
        found.append("no py.typed")
    for field in ("Classifier", "Project-URL", "Requires-Python", "License-Expression"):
        if not told.get_all(field):
            found.append(f"no {field}")
    found += [
        f"a link in its README that is dead on an index: {link}" for link in relative_links(str(told.get_payload()))
    ]
    return [f"{wheel.name} has {fault}" for fault in found]
