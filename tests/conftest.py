"""Fixtures: wheels of every distribution, and environments that contain chosen wheels and their requirements.

Nothing is downloaded. Required packages are linked from the environment of the tests. A requirement that a wheel's
metadata lacks is not linked, so its import fails as it would for a user.
"""

from __future__ import annotations

import email
import importlib.metadata as md
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
SOURCES = [
    path.parent
    for kind in ("core", "plugins", "engines", "heads")
    for path in sorted(ROOT.glob(f"{kind}/*/pyproject.toml"))
]
NOT_COPIED = shutil.ignore_patterns("build", "dist", "*.egg-info", "__pycache__", "emulator", "tests", "training")
BUILD = """
import os, sys
from setuptools.build_meta import build_wheel
folder, *sources = sys.argv[1:]
for source in sources:
    if child := os.fork():  # setuptools is imported once; each process builds one distribution
        assert os.waitpid(child, 0)[1] == 0, source
    else:
        os.chdir(source)
        build_wheel(folder)
        os._exit(0)
"""
Wheels = dict[str, Path]


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command without the caller's Python path and pytest options."""
    ours = ("PYTHONPATH", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in ours} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True)


def build(sources: list[Path], folder: Path) -> None:
    """Build wheels from copies of the sources, so that no old build folder in the tree can leak files into a wheel."""
    copies = [shutil.copytree(one, folder / "sources" / one.name, ignore=NOT_COPIED) for one in sources]
    done = run(sys.executable, "-c", BUILD, folder, *copies)
    assert done.returncode == 0, done.stderr


@pytest.fixture(name="build", scope="session")
def _build() -> Callable[[Path, Path], Path]:
    """Return a function (source, folder) that builds the wheel of a distribution that is not in this repository."""

    def one(source: Path, folder: Path) -> Path:
        build([source], folder)
        return next(folder.glob("*.whl"))

    return one


@pytest.fixture(scope="session")
def wheels(shared: Callable[[str], AbstractContextManager[Path]]) -> Wheels:
    """Return each distribution's wheel by name; the first pytest worker builds the wheels for all workers."""
    with shared("wheels") as folder:
        if not (folder / "built").exists():
            build(SOURCES, folder)
            (folder / "built").touch()
    return {canonicalize_name(path.name.partition("-")[0]): path for path in folder.glob("*.whl")}


def requirements(name: str, extras: set[str], wheels: Wheels) -> list[Requirement]:
    """Return a distribution's requirements with these extras, from its new wheel or from the installed package."""
    if name in wheels:
        with zipfile.ZipFile(wheels[name]) as wheel:
            [metadata] = [entry for entry in wheel.namelist() if entry.endswith(".dist-info/METADATA")]
            lines = email.message_from_bytes(wheel.read(metadata)).get_all("Requires-Dist") or []
    else:
        lines = md.requires(name) or []
    wanted = [Requirement(line) for line in lines]
    return [
        one for one in wanted if one.marker is None or any(one.marker.evaluate({"extra": x}) for x in extras | {""})
    ]


def closure(roots: list[str], wheels: Wheels) -> set[str]:
    """Return the names of all packages that pip would install for these requirements."""
    waiting, found = [Requirement(line) for line in roots], {}
    while waiting:
        one = waiting.pop()
        name = canonicalize_name(one.name)
        if name not in found or not one.extras <= found[name]:
            found[name] = found.get(name, set()) | one.extras
            waiting += requirements(name, found[name], wheels)
    return set(found)


@pytest.fixture
def environment(wheels: Wheels, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that makes an environment and returns its bin; wheels in `bare` get no requirements."""

    def make(*roots: str, bare: tuple[str | Path, ...] = ()) -> Path:
        venv.create(tmp_path / "env", symlinks=True)
        [site] = (tmp_path / "env").glob("lib/python*/site-packages")
        names = closure(list(roots), wheels)
        for name in names - set(wheels):
            for top in {file.parts[0] for file in md.files(name) or () if file.parts[0] not in ("..", "__pycache__")}:
                if not (site / top).exists():
                    (site / top).symlink_to(md.distribution(name).locate_file(top))
        python = tmp_path / "env" / "bin" / "python"
        # `pip --python` starts a second pip process with this command; running it directly saves one process start
        pip = (python, md.distribution("pip").locate_file("pip"), "--quiet", "--disable-pip-version-check", "install")
        chosen = [wheels[name] for name in names & set(wheels)] + [wheels.get(one, one) for one in bare]
        done = run(*pip, "--no-deps", "--no-index", *chosen)
        assert done.returncode == 0, done.stderr
        return python.parent

    return make
