"""Environments of this repository: made from locks with hashes, and their tests.

    python tools/environments.py make dev             create or update environments
    python tools/environments.py test vllm sglang     make them, then run their tests
    python tools/environments.py lock vllm            compile tools/locks/vllm.txt again (needs uv)

tools/environments.toml describes each environment. pip installs the packages, because uv does not read pip's
configuration. That configuration names a folder or index with CPU builds of torch, on machines that have one.
Needs Python 3.11 or newer and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tools" / "environments.toml"
LOCKS = ROOT / "tools" / "locks"
CONSTRAINTS = ROOT / "constraints.txt"
UNLOCKED = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
"""Names of packages that come with a build of torch, and so stand in no lock."""
LOWEST = "3.11.5"
"""Lowest Python that locks are compiled for."""


class EnvironmentFailed(Exception):
    """Raised if a package is unavailable or a tool is missing. The text is one sentence for the user."""


@dataclass(frozen=True)
class Environment:
    """One environment of environments.toml, merged with the environments that it extends; that file explains fields."""

    name: str
    folder: str
    requirements: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    unlocked: tuple[str, ...] = ()
    index: str = ""
    overrides: tuple[str, ...] = ()
    constraints: bool = True
    local: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    wheels: tuple[str, ...] = ()
    wheel_options: tuple[str, ...] = ()
    test: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)
    optional: bool = False

    @property
    def home(self) -> Path:
        """Folder of the environment."""
        return ROOT / self.folder

    @property
    def python(self) -> Path:
        """Interpreter of the environment."""
        return self.home / "bin" / "python"

    @property
    def lock(self) -> Path:
        """File that lists every locked version with its hashes."""
        return LOCKS / f"{self.name}.txt"

    @property
    def stamp(self) -> Path:
        """File with the digest of what was installed; it is written last, so it is missing after a failure."""
        return self.home / f"{self.name}.sha256"

    def digest(self) -> str:
        """Digest of everything that decides which packages are installed."""
        found = hashlib.sha256(repr(self).encode())
        for file in (self.lock, *(ROOT / one / "pyproject.toml" for one in self.local)):
            found.update(file.read_bytes())
        return found.hexdigest()


def read(name: str) -> Environment:
    """Return the environment with this name.

    Raises:
        EnvironmentFailed: environments.toml has no table of that name.
    """
    tables = tomllib.loads(DATA.read_text(encoding="utf-8"))
    if name not in tables:
        raise EnvironmentFailed(f"no environment is named {name}; environments.toml has {', '.join(tables)}")
    table = _merged(tables, name)
    file = table.pop("bare_file", None)
    if file is not None:
        lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
        table["bare"] = [*table["bare"], *(line for line in lines if line and not line.startswith("#"))]
    fixed = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    return Environment(name, **fixed)


def _merged(tables: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Merge a table over the table that it extends; lists are joined if both have one folder, else replaced."""
    own = dict(tables[name])
    base = own.pop("extends", None)
    replaced = own.pop("replace", {})
    if base is None:
        return own
    table = _merged(tables, base)
    joined = "folder" not in own
    for key, value in own.items():
        table[key] = [*table.get(key, ()), *value] if joined and isinstance(value, list) else value
    for key in ("requirements", "bare", "unlocked"):
        table[key] = [replaced.get(re.split(r"[=<>]", one)[0], one) for one in table.get(key, ())]
    return table


def run(*command: object, quiet: bool = False, cwd: Path = ROOT) -> bool:
    """Run one command, by default in the repository's root; return True if it succeeded."""
    out = subprocess.DEVNULL if quiet else None
    return subprocess.run([str(word) for word in command], cwd=cwd, stdout=out, stderr=out, check=False).returncode == 0


def make(one: Environment) -> None:
    """Create an environment, or update it if its description has changed since the last installation.

    Raises:
        EnvironmentFailed: a package could not be installed.
    """
    digest = one.digest()
    if one.stamp.exists() and one.stamp.read_text() == digest:
        return
    if not one.python.exists():
        venv.create(one.home, with_pip=True)
    one.stamp.unlink(missing_ok=True)
    pip = (one.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    steps: list[tuple[object, ...]] = [("--no-deps", "--require-hashes", "-r", one.lock)]
    if one.unlocked:
        index = ("--no-deps", "--retries", "1", "--extra-index-url", one.index) if one.index else ()
        steps.append((*index, *one.unlocked))
    if one.local:
        folders = [word for folder in one.local for word in ("-e", folder)]
        steps.append(("--no-deps", "--no-build-isolation", *folders))
    for step in steps:
        if not run(*pip, *step):
            raise EnvironmentFailed(f"{one.folder} is not complete: pip could not install {_shown(step)}")
    if one.path:
        [site] = one.home.glob("lib/python*/site-packages")
        (site / "stand_ins.pth").write_text("".join(f"{ROOT / folder}\n" for folder in one.path))
    one.stamp.write_text(digest)


def _shown(step: tuple[object, ...]) -> str:
    """Words of a pip command that name packages, for an error message."""
    return " ".join(str(word) for word in step if not str(word).startswith("-"))


def can_be_had(one: Environment) -> bool:
    """Return True if pip finds the builds of torch that the lock leaves out, or if they are installed."""
    if one.stamp.exists() or not one.unlocked:
        return True
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "1")
    # A system's Python installs nothing outside a target folder, not even in a dry run.
    found = ("--dry-run", "--target", one.home, "--ignore-installed", "--no-deps", "--extra-index-url", one.index)
    return run(*pip, *found, *one.unlocked, quiet=True)


def fetch_wheels(one: Environment) -> None:
    """Download each engine release that tests read, once. If a release is unavailable, print its name and continue."""
    folder = one.home / "wheels"
    folder.mkdir(exist_ok=True)
    options = ("--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", *one.wheel_options)
    for wheel in one.wheels:
        name, version = wheel.split("==")
        found = any(folder.glob(f"{name.replace('-', '_')}-{version}-*"))
        if not found and not run(one.python, "-m", "pip", "download", *options, "--dest", folder, wheel):
            print(f"{wheel} cannot be had here: no test reads its interfaces")


def test(one: Environment) -> bool:
    """Create or update an environment and run its tests; return True if they passed.

    If an optional environment's packages are unavailable, print one line and return True.
    """
    if one.optional and not can_be_had(one):
        print(f"{one.name} was not run: pip finds no {' '.join(one.unlocked)} here")
        return True
    make(one)
    fetch_wheels(one)
    places = {"python": str(one.python), "folder": str(one.home), "root": str(ROOT)}
    variables = {name: value.format(**places) for name, value in one.variables.items()}
    for line in one.test:
        for name, place in places.items():
            line = line.replace("{" + name + "}", place)
        if subprocess.run(["bash", "-c", line], cwd=ROOT, env=os.environ | variables, check=False).returncode:
            return False
    return True


def lock(one: Environment) -> None:
    """Compile the lock file of an environment with uv.

    Raises:
        EnvironmentFailed: uv is not installed, or finds no versions that fit together.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise EnvironmentFailed("uv is not installed; `pip install uv`, then lock again")
    torch = [re.sub(r"\+.*", "", name) for name in one.unlocked if name.startswith("torch==")]
    pinned = {re.split(r"==|\+", name)[0] for name in (*one.requirements, *torch) if "==" in name}
    known = [line for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines() if line.split("==")[0] not in pinned]
    with tempfile.TemporaryDirectory() as folder:
        constraints, overrides = Path(folder, "constraints.txt"), Path(folder, "overrides.txt")
        constraints.write_text("\n".join(known if one.constraints else ()))
        overrides.write_text("\n".join(one.overrides))
        options = ["--constraint", str(constraints), "--override", str(overrides)]
        lines = _compiled(uv, one, [*one.requirements, *torch] if one.requirements else [], options)
    lines += _compiled(uv, one, list(one.bare), ["--no-deps"])
    text = f"# Written by `python tools/environments.py lock {one.name}`.\n" + "".join(lines)
    one.lock.write_text(text, encoding="utf-8")


def _compiled(uv: str, one: Environment, requirements: list[str], options: list[str]) -> list[str]:
    """Return the blocks of a compiled lock, without builds of torch and the packages that come with them."""
    if not requirements:
        return []
    known = ("--quiet", "--universal", "--python-version", LOWEST, "--generate-hashes", "--no-header", "--no-annotate")
    done = subprocess.run(
        [uv, "pip", "compile", *known, *options, "-"],
        cwd=ROOT,
        input="\n".join(requirements),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise EnvironmentFailed(f"uv found no lock of {one.name}: {done.stderr.strip()}")
    blocks = re.findall(r"^\S.*(?:\n .*)*\n", done.stdout, re.MULTILINE)
    return [
        block for block in blocks if not UNLOCKED.fullmatch(re.split(r"[= ]", block)[0]) and "'never'" not in block
    ]  # fmt: skip


def main() -> int:
    """Run the command line; return 0 if every environment was made and every test passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("make", "test", "lock"))
    parser.add_argument("names", nargs="+", metavar="NAME", help="a table of tools/environments.toml")
    asked = parser.parse_args()
    try:
        results = [{"make": make, "test": test, "lock": lock}[asked.action](read(name)) for name in asked.names]
    except EnvironmentFailed as error:
        print(error, file=sys.stderr)
        return 1
    return int(False in results)


if __name__ == "__main__":
    sys.exit(main())
