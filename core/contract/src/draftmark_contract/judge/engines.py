"""Finds the engines with backends to judge, by entry point. No engine is imported."""

from __future__ import annotations

import difflib
import importlib.metadata as md
import importlib.util
from typing import cast

from draftmark.errors import DraftmarkError
from draftmark_tools.cli.errors import ArgumentError

from .target import GROUP, Engine, OfReleases, OpenEngine, TargetInfo

JUDGES = {"sglang": "pip install draftmark-sglang-judge", "vllm": "pip install draftmark-vllm-judge"}
"""Engines with a judge of this project, and the command that installs the judge."""


def engines() -> dict[str, Engine]:
    """Return every engine that an installed distribution registers, by name.

    Raises:
        DraftmarkError: an engine's module cannot be imported.
    """
    found: dict[str, Engine] = {}
    for entry in sorted(md.entry_points(group=GROUP), key=lambda one: one.name):
        try:
            found[entry.name] = cast(Engine, entry.load())
        except Exception as error:
            owner = entry.dist.name if entry.dist else entry.value
            raise DraftmarkError(
                f"importing {entry.value} raised {type(error).__name__}: {error}; reinstall {owner}"
            ) from error
    return found


def absent() -> dict[str, str]:
    """Return the engines of `JUDGES` without an installed judge, each with the command that installs one."""
    names = {entry.name for entry in md.entry_points(group=GROUP)}
    return {name: remedy for name, remedy in JUDGES.items() if name not in names}


def lacks(engine: Engine, target: TargetInfo) -> str:
    """Return the command that installs a target's missing packages, or "" if none is missing."""
    if engine.version() is None:
        return " ".join((target.install or engine.install, *target.needs))
    missing = any(importlib.util.find_spec(module) is None for module in target.modules)
    return f"pip install {' '.join(target.needs)}" if missing else ""


def find(named: str, release: str = "") -> tuple[Engine, TargetInfo]:
    """Return the engine and the target (backend) that ``ENGINE:TARGET`` names, at `release` if one is given.

    Raises:
        ArgumentError: the name is unknown, or a package that the target needs is not installed.
    """
    name, colon, target = named.partition(":")
    known = engines()
    if name in absent():
        raise ArgumentError(f"{named} needs the judge for {name}, which is not installed: {absent()[name]}")
    if name not in known:
        raise ArgumentError(
            f"{named!r} names no engine; there are {', '.join(known) or 'none'}; run `draftmark judge` for a list"
        )
    engine = _at(known[name], release) if release else known[name]
    infos = {info.name: info for info in engine.targets()}
    if colon and target not in infos and isinstance(engine, OpenEngine) and (found := engine.resolve(target)):
        infos[target] = found
    if not colon or target not in infos:
        near = difflib.get_close_matches(target.upper(), infos, 1) or difflib.get_close_matches(target, infos, 1)
        hint = f"did you mean {name}:{near[0]}?" if near else f"{name} has {', '.join(infos)}"
        raise ArgumentError(f"{named!r} names no backend of an engine; {hint}")
    if remedy := lacks(engine, infos[target]):
        raise ArgumentError(f"{named} needs packages that are not installed: {remedy}")
    return engine, infos[target]


def _at(engine: Engine, release: str) -> Engine:
    if not isinstance(engine, OfReleases):
        raise ArgumentError(
            f"--release {release}: {engine.name} is judged only at its installed release; install that release"
        )
    return engine.at(release)
