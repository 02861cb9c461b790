"""List of this repository's distributions, in the order of publication."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .publisher import AUTHORS, urls

ROOT = Path(__file__).parents[2]
KINDS = ("core", "plugins", "engines", "heads")
"""Folders of distributions."""


@dataclass(frozen=True)
class Distribution:
    """One distribution: a folder with a pyproject.toml.

    Attributes:
        folder: folder of the distribution.
        project: the table `[project]` of its pyproject.toml.
    """

    folder: Path
    project: dict[str, Any]

    @property
    def name(self) -> str:
        """Name of the distribution, such as ``"draftmark-cuda-triton"``."""
        return str(self.project["name"])

    @property
    def version(self) -> str:
        """Version in pyproject.toml; if pyproject.toml takes the version from code, the core's version."""
        return str(self.project.get("version", core_version()))

    @property
    def requirements(self) -> list[str]:
        """Required packages, including the packages of all extras."""
        extras = self.project.get("optional-dependencies", {}).values()
        return [*self.project.get("dependencies", []), *(one for extra in extras for one in extra)]

    @property
    def needed(self) -> list[str]:
        """Packages that must be published first: required ones, and those of the extra `runtime`."""
        runtime = self.project.get("optional-dependencies", {}).get("runtime", [])
        return [*self.project.get("dependencies", []), *runtime]

    @property
    def backends(self) -> list[str]:
        """Names of the backends that the distribution registers as entry points."""
        return list(self.project.get("entry-points", {}).get("draftmark.backends.v1", {}))


def core_version() -> str:
    """Return the version that the core's code contains."""
    text = (ROOT / "core/draftmark/src/draftmark/version.py").read_text(encoding="utf-8")
    [found] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


def span() -> str:
    """Return the version range that distributions require of each other: from the core's version to the next minor."""
    major, minor, *_ = core_version().split(".")
    return f">={core_version()},<{major}.{int(minor) + 1}"


def distributions() -> list[Distribution]:
    """Return all distributions, each after the distributions that it or its extra `runtime` requires.

    Other extras do not count: `draftmark-contract[proof]` requires a distribution that requires `draftmark-contract`.

    Raises:
        ValueError: two distributions require each other.
    """
    waiting = [read(path) for kind in KINDS for path in sorted(ROOT.glob(f"{kind}/*/pyproject.toml"))]
    names = {one.name for one in waiting}
    ordered: list[Distribution] = []
    while waiting:
        done = {one.name for one in ordered}
        ready = [one for one in waiting if not (_siblings(one.needed) & names) - done]
        if not ready:
            raise ValueError(f"{', '.join(one.name for one in waiting)} require each other")
        ordered += ready
        waiting = [one for one in waiting if one not in ready]
    return ordered


def siblings(one: Distribution) -> set[str]:
    """Return the names of this repository's distributions that a distribution or one of its extras requires."""
    return _siblings(one.requirements)


def _siblings(requirements: list[str]) -> set[str]:
    names = (re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in requirements)
    return {name for name in names if name.startswith("draftmark")}


def faults(one: Distribution) -> list[str]:
    """Return one sentence for each fault of a distribution's pyproject.toml and folder."""
    project, found = one.project, []
    if one.version != core_version():
        found.append(f"its version is {one.version}, but the core's is {core_version()}")
    if not any("3.11" in line for line in project.get("classifiers", [])):
        found.append("its classifiers do not have Python 3.11")
    if project.get("urls") != urls():
        found.append(f"its URLs are not {urls()}")
    if project.get("authors") != [{"name": AUTHORS}]:
        found.append(f"its authors are not {AUTHORS!r}")
    licence = one.folder / "LICENSE"
    if project.get("license-files") != ["LICENSE"] or not licence.is_file():
        found.append('it has no licence: add LICENSE, and license-files = ["LICENSE"]')
    elif licence.read_bytes() != (ROOT / "LICENSE").read_bytes():
        found.append("its LICENSE is not the repository's")
    if not list(one.folder.glob("src/*/py.typed")):
        found.append("its package has no py.typed")
    found += [f"{need} has no upper bound" for need in one.requirements if not _is_bounded(need)]
    found += [
        f"{need} must end with {span()}, as every requirement of a draftmark distribution"
        for need in one.requirements
        if need.startswith("draftmark") and not need.endswith(span())
    ]
    return [f"{one.name}: {fault}" for fault in found]


def _is_bounded(requirement: str) -> bool:
    """Return True if a requirement has an upper bound on its version."""
    return "<" in requirement or "==" in requirement


def read(path: Path) -> Distribution:
    """Return the distribution of a pyproject.toml."""
    return Distribution(path.parent, tomllib.loads(path.read_text(encoding="utf-8"))["project"])
