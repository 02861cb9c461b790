"""Trial of one wheel: it is installed in a new environment, and its sizing tier runs in that environment."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

from .distributions import ROOT, Distribution, siblings

LIGHT = ("draftmark-core", "draftmark", "draftmark-reference", "draftmark-contract", "draftmark-proof")
"""Distributions without torch among their requirements. The other wheels are installed without their requirements."""
JUDGES = ("draftmark", "draftmark-contract[proof]")


def trial(one: Distribution, dist: Path, folder: Path, sample: int) -> str:
    """Install and run one distribution; return a line with what was run.

    Args:
        one: the distribution.
        dist: folder of the wheels.
        folder: folder of the new environment.
        sample: cases of each check of the sizing tier; 0 for all.

    Raises:
        RuntimeError: an installation or a run failed; the message has its output.
    """
    python = _environment(folder)
    if one.name in LIGHT:
        _install(python, dist, [one.name])
    else:
        _install(python, dist, [str(_wheel(dist, one.name))], "--no-deps")
    package = next(path.parent.name for path in one.folder.glob("src/*/py.typed"))
    _run(python, "-c", f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)")
    if not one.backends:
        return f"{one.name}: installed without other packages"
    _install(python, dist, list(JUDGES))
    # the plugin also runs code of these distributions, so they must be installed for its sizing tier
    others = sorted(siblings(one) - set(LIGHT))
    for name in others:
        _install(python, dist, [str(_wheel(dist, name))], "--no-deps")
    for name in one.backends:
        part = ("--sample", str(sample), "--allow-part")
        _run(python, "-m", "draftmark_tools.cli", "contract", name, "--tier", "sizing", *part)
    cases = f"{sample} {'case' if sample == 1 else 'cases'} of each check" if sample else "all cases"
    judged = " with ".join([", ".join(one.backends), *others])
    return f"{one.name}: installed without other packages; sizing tier of {judged}, {cases}: passed"


def _wheel(dist: Path, name: str) -> Path:
    return next(dist.glob(f"{name.replace('-', '_')}-*.whl"))


def _environment(folder: Path) -> Path:
    venv.create(folder, symlinks=True)
    return folder / "bin" / "python"


def _install(python: Path, dist: Path, wanted: list[str], *options: str) -> None:
    """Install packages from the built files; other packages come from an index, in the versions of constraints.txt.

    It uses this environment's pip, because unpacking a pip into each new environment takes longer.
    """
    known = ("--find-links", str(dist), "--constraint", str(ROOT / "constraints.txt"))
    pip = ("-m", "pip", "--python", str(python), "--quiet", "--disable-pip-version-check", "install")
    _run(Path(sys.executable), *pip, *known, *options, *wanted)


def _run(python: Path, *words: str) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTEST_ADDOPTS")}
    done = subprocess.run(
        (str(python), *words), capture_output=True, text=True, cwd=python.parent, env={**kept, "OMP_NUM_THREADS": "1"}
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(words)}\nended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )


def tool(*words: str) -> None:
    """Run a tool of this environment as ``python -m``.

    Raises:
        RuntimeError: the tool failed; the message has its output.
    """
    _run(Path(sys.executable), *words)
