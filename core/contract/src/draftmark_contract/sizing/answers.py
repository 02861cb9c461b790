"""Answers of a backend's sizing hooks and notes as plain data, which can be compared between processes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, cast

from draftmark.geometry import CORE_MODES, LAYOUT_FORMS, DeviceProfile, Geometry, Mode
from draftmark.loaded import LoadedBackend

from ..notes import Notes
from ..profiles import MANDATORY
from .batches import BatchShape, limit_batches
from .claims import claim
from .geometries import odd_geometries, tight_geometries
from .usage import PlainBatch

Answers = dict[str, Any]
"""Answer by hook: supports, and those of `HOOKS` where nothing is refused."""
HOOKS = ("requirements", "buffers", "layouts", "usage", "roundoffs")


@cache
def questions() -> tuple[Geometry, ...]:
    """Return the geometries to ask about: odd ones, ones of an engine's size, and one for each mode and form."""
    modes = tuple(mode for mode in Mode if mode not in CORE_MODES)
    claims = [claim(MANDATORY, (Mode.EXTEND, mode), forms) for mode in modes for forms in ((), LAYOUT_FORMS)]
    return (*(case.value for case in (*odd_geometries(), *tight_geometries())), *claims)


def answers_of(
    backend: LoadedBackend, device: DeviceProfile, geometries: Sequence[Geometry], hooks: Sequence[str] | None = None
) -> list[Answers]:
    """Return the backend's answers about each geometry on a device, by hook, in the order of the questions.

    Args:
        hooks: names of the hooks to ask, in this order; None asks all of them.
    """
    notes = Notes(backend)
    known: dict[str, Callable[[Geometry], Any]] = {
        "requirements": backend.requirements,
        "buffers": backend.buffers,
        "layouts": notes.layouts,
        "usage": lambda geometry: _usage(notes, geometry),
        "roundoffs": lambda geometry: {mode: notes.roundoffs(geometry, mode) for mode in geometry.modes},
    }
    found = []
    for one in geometries:
        geometry = replace(one, device=device)
        answers: Answers = {"supports": plain(backend.supports(geometry))}
        if not answers["supports"]:
            answers |= {name: plain(known[name](geometry)) for name in (HOOKS if hooks is None else hooks)}
        found.append(answers)
    return found


def _usage(notes: Notes, geometry: Geometry) -> list[dict[str, int]]:
    """Return the usage of the first and the last batch at the geometry's limits, for every core mode."""
    found: dict[Mode, list[BatchShape]] = {}
    core = replace(geometry, modes=tuple(mode for mode in geometry.modes if mode in CORE_MODES))
    for batch in limit_batches(core) if notes.has_usage else ():
        found[batch.mode] = [*found.get(batch.mode, ())[:1], batch]
    return [notes.usage(geometry, cast(Any, PlainBatch(batch))) for batches in found.values() for batch in batches]


def plain(value: Any) -> Any:
    """Return a value as JSON data. Equal values give equal data, and values of different types differ."""
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if is_dataclass(value) and not isinstance(value, type):
        return {type(value).__name__: {one.name: plain(getattr(value, one.name)) for one in fields(value)}}
    if isinstance(value, dict):
        return {str(plain(key)): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value if isinstance(value, str | int | type(None)) else repr(value)


def difference(here: Any, there: Any, path: str = "") -> tuple[str, Any, Any] | None:
    """Return the place of the first difference of two JSON values, with both values there; None if they are equal."""
    if isinstance(here, dict) and isinstance(there, dict) and list(here) == list(there):
        pairs = [(f"{path}.{name}", here[name], there[name]) for name in here]
    elif isinstance(here, list) and isinstance(there, list) and len(here) == len(there):
        pairs = [(f"{path}[{i}]", one, there[i]) for i, one in enumerate(here)]
    else:
        return None if here == there and type(here) is type(there) else (path, here, there)
    return next((found for name, one, other in pairs if (found := difference(one, other, name))), None)
