"""Hooks of a loaded backend that serve layers with recurrent state. Does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .buffers import BufferSpec
from .errors import BackendRefusal, BufferError
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
        listed = recurrence is None or recurrence in self.info.recurrences
        found = self._offer("state_supports", geometry=geometry)
        reasons: list[str] = [] if found is None and not listed else found
        if not isinstance(reasons, list) or not all(isinstance(reason, str) and reason for reason in reasons):
            raise self._wrong_return("state_supports", "sentences (non-empty str)", reasons)
        if recurrence is not None and not listed:
            lacking = f"recurrence {recurrence.value} is not served: it is not in BackendInfo.recurrences"
            return [f"{lacking}; use a backend that lists it, such as reference", *reasons]
        modes = [mode for mode in geometry.modes if mode not in self.info.modes]
        return [*(f"mode {mode.value} is not served: it is not in BackendInfo.modes" for mode in modes), *reasons]

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
            checked: check each call's order, shapes and contents; this reads the device in eager steps. None checks
                if the arena has guard words.

        Raises:
            BackendRefusal: `BackendInfo.recurrences` does not list the layer's recurrence.
        """
        from .arena import Arena
        from .state import StateBackend

        if not isinstance(arena, Arena):
            raise BufferError(f"arena is {arena!r}, but it must be an Arena; pass the result of allocate_state")
        self.require_state(geometry)
        backend: Any = self._call("open_state", object, geometry=geometry, arena=arena)
        if not isinstance(backend, StateBackend):
            raise self._wrong_return("open_state", "a StateBackend (plan, write_metadata, …)", backend)
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

    if TYPE_CHECKING:

        def require_runtime(self, device: torch.device | str) -> None:
            """Raise unless the vendor packages and `device` are present."""
