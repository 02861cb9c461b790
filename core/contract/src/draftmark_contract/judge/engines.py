"""The engines whose backends can be judged, found by entry point; nothing of an engine is imported."""

from __future__ import annotations

import difflib
import importlib.metadata as md
import importlib.util
from typing import cast

from draftmark.cli.errors import ArgumentError
from draftmark.errors import DraftmarkError

from .target import GROUP, Engine, OfReleases, TargetInfo

ADAPTERS = {"sglang": "pip install draftmark-sglang", "vllm": "pip install draftmark-vllm"}
"""Engines of draftmark's own distributions, which may be absent, and what brings their targets."""


def engines() -> dict[str, Engine]:
    """Every engine that an installed distribution brings, by name.

    Raises:
        DraftmarkError: the module of one cannot be imported.
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
    """Engines of draftmark's own distributions that no installed distribution brings, and the line that brings each."""
    names = {entry.name for entry in md.entry_points(group=GROUP)}
    return {name: remedy for name, remedy in ADAPTERS.items() if name not in names}


def lacks(engine: Engine, target: TargetInfo) -> str:
    """The line that installs what a target lacks here; empty where it lacks nothing."""
    if engine.version() is None:
        return " ".join((target.install or engine.install, *target.needs))
    missing = any(importlib.util.find_spec(module) is None for module in target.modules)
    return f"pip install {' '.join(target.needs)}" if missing else ""


def find(named: str, release: str = "") -> tuple[Engine, TargetInfo]:
    """The engine and the target of ``ENGINE:TARGET``, at a release of the engine's where one is named.

    Raises:
        ArgumentError: there is none of that name, or what it needs is not installed.
    """
    name, colon, target = named.partition(":")
    known = engines()
    if name in absent():
        raise ArgumentError(f"{named!r} needs the targets of {name}: {absent()[name]}")
    if name not in known:
        raise ArgumentError(f"{named!r} names no engine; there are {', '.join(known) or 'none'}: `draftmark judge`")
    engine = _at(known[name], release) if release else known[name]
    infos = {info.name: info for info in engine.targets()}
    if not colon or target not in infos:
        near = difflib.get_close_matches(target.upper(), infos, 1) or difflib.get_close_matches(target, infos, 1)
        hint = f"did you mean {name}:{near[0]}?" if near else f"{name} has {', '.join(infos)}"
        raise ArgumentError(f"{named!r} names no backend that can be judged; {hint}")
    if remedy := lacks(engine, infos[target]):
        raise ArgumentError(f"{named} needs what is not installed here: {remedy}")
    return engine, infos[target]


def _at(engine: Engine, release: str) -> Engine:
    if not isinstance(engine, OfReleases):
        raise ArgumentError(
            f"--release {release}: {engine.name} is judged as it is installed here; install that release"
        )
    return engine.at(release)
