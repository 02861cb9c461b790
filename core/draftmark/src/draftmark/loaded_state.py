"""Hooks of a loaded backend that serve layers with recurrent state. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .buffers import BufferSpec
from .errors import BackendRefusal
from .geometry import StateGeometry
from .hook_calls import HookCalls

if TYPE_CHECKING:
    import torch

    from .arena import Arena
    from .state import StateBackend


class StateHooks(HookCalls):
    """Base of `LoadedBackend`: the optional hooks of layers with recurrent state, as plain methods."""

    def state_supports(self, geometry: StateGeometry) -> list[str]:
        """Return the reasons why the backend does not serve `geometry`; an empty list means that it is served.

        A plugin that does not list the recurrence in `BackendInfo.recurrences` serves no such state. Its own reasons
        come after that one.
        """
        recurrence = geometry.state.recurrence if isinstance(geometry, StateGeometry) else None
        lacks = recurrence is not None and recurrence not in self.info.recurrences
        reasons = self._reasons("state_supports", geometry, optional=lacks)
        if recurrence is not None and lacks:
            lacking = f"recurrence {recurrence.value} is not served: it is not in BackendInfo.recurrences"
            return [f"{lacking}; use a backend that lists it, such as reference", *reasons]
        return self._unserved_modes(geometry) + reasons

    def require_state(self, geometry: StateGeometry) -> None:
        """Raise `BackendRefusal` with the backend's reasons unless it serves `geometry`."""
        reasons = self.state_supports(geometry)
        if reasons:
            raise BackendRefusal(self.name, reasons)

    def state_buffers(self, geometry: StateGeometry) -> list[BufferSpec]:
        """Return the validated specifications of the buffers to allocate for `geometry`."""
        return self._specs("state_buffers", geometry)

    def allocate_state(
        self, geometry: StateGeometry, device: torch.device | str, *, guard: bool | None = None
    ) -> Arena:
        """Allocate the buffers of `geometry` on `device`; arguments and errors as in `LoadedBackend.allocate`."""
        self.require_state(geometry)
        self.require_runtime(device)
        from .arena import Arena

        return Arena.allocate(self.state_buffers(geometry), device, guard=guard)

    def bind_state(self, geometry: StateGeometry, arena: Arena, *, checked: bool | None = None) -> StateBackend:
        """Return the object that the step loop calls for state layers, bound to an arena of `allocate_state`.

        Args:
            checked: as in `LoadedBackend.bind`.

        Raises:
            BackendRefusal: `BackendInfo.recurrences` does not list the layer's recurrence.
        """
        from .state import StateBackend

        self.require_state(geometry)
        backend: StateBackend = self._opened("open_state", geometry, arena, StateBackend)
        if not (arena.guarded if checked is None else checked):
            return backend
        from .guard import guard_checks

        guarded: StateBackend = guard_checks().GuardedState(backend, geometry)
        return guarded

    def open_state(
        self,
        geometry: StateGeometry,
        device: torch.device | str,
        *,
        guard: bool | None = None,
        checked: bool | None = None,
    ) -> StateBackend:
        """Allocate the buffers and bind the backend in one call, for a caller that does not need the arena."""
        return self.bind_state(geometry, self.allocate_state(geometry, device, guard=guard), checked=checked)
