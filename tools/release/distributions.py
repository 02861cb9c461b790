"""The distributions of this repository, in the order in which they are published."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS = ("core", "plugins", "engines", "heads")
"""Folders of distributions."""


@dataclass(frozen=True)
class Distribution:
    """One folder with a pyproject.toml.

    Attributes:
        folder: where it lies.
        project: the table `[project]`.
    """

    folder: Path
    project: dict[str, Any]

    @property
    def name(self) -> str:
        """``"draftmark-cuda-triton"``."""
        return str(self.project["name"])

    @property
    def version(self) -> str:
        """Its own, or the core's where it is taken from the code."""
        return str(self.project.get("version", core_version()))

    @property
    def requirements(self) -> list[str]:
        """What it asks for, its extras included."""
        extras = self.project.get("optional-dependencies", {}).values()
        return [*self.project.get("dependencies", []), *(one for extra in extras for one in extra)]

    @property
    def backends(self) -> list[str]:
        """The backends that its entry points name."""
        return list(self.project.get("entry-points", {}).get("draftmark.backends.v1", {}))


def core_version() -> str:
    """The one version: that of the core's code."""
    text = (ROOT / "core/draftmark/src/draftmark/version.py").read_text(encoding="utf-8")
    [found] = re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return str(found)


def span() -> str:
    """How one asks for its siblings: from the core's version on, up to the next minor."""
    major, minor, *_ = core_version().split(".")
    return f">={core_version()},<{major}.{int(minor) + 1}"


def distributions() -> list[Distribution]:
    """All of them, each behind those that it asks for.

    Raises:
        ValueError: two ask for each other.
    """
    waiting = [_read(path) for kind in KINDS for path in sorted(ROOT.glob(f"{kind}/*/pyproject.toml"))]
    names = {one.name for one in waiting}
    ordered: list[Distribution] = []
    while waiting:
        done = {one.name for one in ordered}
        ready = [one for one in waiting if not (siblings(one) & names) - done - {one.name}]
        if not ready:
            raise ValueError(f"{', '.join(one.name for one in waiting)} ask for each other")
        ordered += ready
        waiting = [one for one in waiting if one not in ready]
    return ordered


def siblings(one: Distribution) -> set[str]:
    """Names of the distributions of this repository that one asks for."""
    names = (re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0] for requirement in one.requirements)
    return {name for name in names if name.startswith("draftmark")}


def faults(one: Distribution) -> list[str]:
    """One sentence for each thing that its pyproject.toml and its folder lack."""
    project, found = one.project, []
    if one.version != core_version():
        found.append(f"its version is {one.version}, and the core's {core_version()}")
    if not any("3.11" in line for line in project.get("classifiers", [])):
        found.append("it has no classifiers")
    if not project.get("urls"):
        found.append("it has no URL")
    licence = one.folder / "LICENSE"
    if project.get("license-files") != ["LICENSE"] or not licence.is_file():
        found.append('it carries no licence: add LICENSE, and license-files = ["LICENSE"]')
    elif licence.read_bytes() != (ROOT / "LICENSE").read_bytes():
        found.append("its LICENSE is not the repository's")
    if not list(one.folder.glob("src/*/py.typed")):
        found.append("its package has no py.typed")
    found += [f"{need} has no upper bound" for need in one.requirements if not _is_bounded(need)]
    found += [
        f"{need} is not {span()}, which every sibling is asked for by"
        for need in one.requirements
        if need.startswith("draftmark") and not need.endswith(span())
    ]
    return [f"{one.name}: {fault}" for fault in found]


def _is_bounded(requirement: str) -> bool:
    """Siblings by their extra alone, as ``draftmark[torch]``, are bounded by the plain requirement beside."""
    return "<" in requirement or "==" in requirement


def _read(path: Path) -> Distribution:
    return Distribution(path.parent, tomllib.loads(path.read_text(encoding="utf-8"))["project"])
