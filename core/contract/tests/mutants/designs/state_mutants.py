"""Parts that several mutants share: state_mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from draftmark import BufferSpec, StateGeometry
from draftmark_reference import ReferencePlugin

from ..mutant import ONLY, Mutant
from .layouts import ONE_DESIGN
from .state_designs import StateDesign
from .state_plugin import state_plugin


def resized_state(design: type[StateDesign], shape: Any) -> dict[str, Any]:
    """Return a plugin's field with buffers of other shapes. `shape` takes a geometry and a buffer's shape."""

    def state_buffers(self: Any, geometry: StateGeometry) -> list[BufferSpec]:
        kept = design.buffers(geometry)  # type: ignore[attr-defined]
        return [replace(one, shape=shape(geometry, one.shape)) for one in kept]

    return {"state_buffers": state_buffers}


def state_mutant(name: str, what: str, design: type[StateDesign], source: str = "", **fields: Any) -> Mutant:
    plugin = state_plugin(design, **fields)
    return Mutant(name, what, source, layouts=("tutorial",), absent=ONLY, plugin=plugin, of_state=True)


def sized_mutant(name: str, what: str, design: type[StateDesign], shape: Any, source: str) -> Mutant:
    return state_mutant(name, what, design, source, **resized_state(design, shape))


def reference_mutant(name: str, what: str, rollback: str, patch: Callable[[Any], None], source: str) -> Mutant:
    base = ReferencePlugin(rollback)  # type: ignore[arg-type]
    return Mutant(
        name, what, source, state_patch=patch, layouts=("reference",), absent=ONE_DESIGN, base=base, of_state=True
    )
