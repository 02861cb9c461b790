"""Parts that several mutants share: workspaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftmark import BufferSpec, Geometry

Shape = tuple[int, ...]


def short_if(condition: Callable[[Geometry], Any], by: int = 1) -> Callable[[Geometry, Shape], Shape]:
    """Return a shape function that makes a buffer `by` rows too short in geometries that meet the condition."""
    return lambda g, s: (s[0] - by, *s[1:]) if condition(g) else s


def own(
    entries: Callable[[Geometry], Any], used: Callable[[Geometry, Any], Any], name: str = "scratch"
) -> dict[str, Callable[..., Any]]:
    """Return hooks of a backend with a workspace of `entries` bytes, and with `used` as its usage in a batch."""

    def buffers(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [*specs, BufferSpec("scratch", (entries(geometry),), "uint8", "a query")]

    def usage(geometry: Geometry, found: dict[str, int], batch: Any) -> dict[str, int]:
        return {**found, name: used(geometry, batch)}

    return {"buffers": buffers, "usage": usage}


def full(geometry: Geometry) -> Any:
    return 16 * geometry.max_rows_any * geometry.device.num_sms


def needs(geometry: Geometry, batch: Any) -> int:
    return 16 * batch.num_rows * geometry.device.num_sms


RIGHT = own(full, needs)
"""Hooks of a correct workspace; the mutants below change it."""
