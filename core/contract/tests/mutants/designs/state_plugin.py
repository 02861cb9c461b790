"""Plugin of the tutorial that serves recurrent state in one of the designs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark import BufferSpec, Recurrence, StateGeometry
from draftmark.geometry import Mode
from draftmark.runtime import Arena

from .masked_states import Masked
from .state_designs import Columns, StateDesign
from .tutorial import Plugin


class StatePlugin(Plugin):
    """Plugin of the tutorial that also serves recurrent state, in one of the designs."""

    design: type[StateDesign] = Columns
    info = replace(Plugin.info, recurrences=tuple(Recurrence), modes=tuple(Mode))

    def state_buffers(self, geometry: StateGeometry) -> list[BufferSpec]:
        """Return the buffers of the design."""
        return self.design.buffers(geometry)  # type: ignore[attr-defined, no-any-return]

    def open_state(self, geometry: StateGeometry, arena: Arena) -> Any:
        """Return the backend of the design."""
        return self.design(geometry, arena)


def state_plugin(design: type[StateDesign], **fields: Any) -> type[StatePlugin]:
    """Return a plugin class that opens `design` for layers with recurrent state."""
    return type(
        f"{design.__name__}Plugin", (StatePlugin,), {"design": design, "__module__": Plugin.__module__, **fields}
    )


STATE_DESIGNS: dict[str, type[StateDesign]] = {one.__name__: one for one in (Columns, Masked)}
