"""Plain methods around the hooks of a loaded backend, with checks of every returned value.

This module does not import torch. `info`, `supports`, `requirements` and `buffers` work without torch, so that
`draftmark list` and `draftmark size` run anywhere. `allocate` and `open` need a device.
"""

from __future__ import annotations

import importlib.metadata as md
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from .buffers import BufferSpec
from .errors import BackendRefusal
from .geometry import Geometry, StateGeometry
from .kernels import BatchSize, KernelChoice, Progress, WarmedKernels, prepares_kernels
from .loaded_state import StateHooks
from .registration import plugin_of
from .requirements import HostLengthsNeed, Requirements

if TYPE_CHECKING:
    import torch

    from .arena import Arena
    from .backend import BoundBackend
    from .graphs import GraphState
    from .tree import TreeOps

logger = logging.getLogger(__package__)


class LoadedBackend(StateHooks):
    """A backend plugin with its hooks as plain methods; `HookCalls` has the attributes name, plugin and info.

    Every method that calls a hook raises `BackendHookError` when the hook raises or returns a wrong type. Only a
    `DraftmarkError` that the hook raises reaches the caller unchanged.
    """

    @classmethod
    def from_entry_point(cls, entry: md.EntryPoint) -> LoadedBackend:
        """Import one entry point and check its plugin; create an instance if the entry point names a class.

        Raises:
            BackendLoadError: the import failed, or a hook is missing, unknown or has a wrong signature.
        """
        return cls(entry.name, plugin_of(entry))

    # -- integers, no device ------------------------------------------------------------------------------

    def supports(self, geometry: Geometry) -> list[str]:
        """Return the reasons why the backend does not serve `geometry`; an empty list means that it is served.

        The plugin's own hook never gets a latent layer, row format, chosen keys or narrow values that it does not
        claim.
        """
        unclaimed = self._unclaimed_rows(geometry) if isinstance(geometry, Geometry) else []  # else the call refuses it
        if unclaimed:
            return unclaimed + self._undeclared(geometry)
        reasons = self._reasons("supports", geometry)
        return self._undeclared(geometry) + reasons

    def _undeclared(self, geometry: Geometry) -> list[str]:
        """Return one reason for each mode, form and feature of `geometry` that `BackendInfo` does not declare."""
        sinks = geometry.attention.sinks and not self.info.sinks
        invariance = geometry.limits.batch_invariant and not self.info.batch_invariant
        return [
            *self._unserved_modes(geometry),
            *self._unclaimed_forms(geometry),
            *(["attention sinks are not served: BackendInfo.sinks is False"] if sinks else []),
            *(["batch invariance is not served: BackendInfo.batch_invariant is False"] if invariance else []),
        ]

    def _unclaimed_forms(self, geometry: Geometry) -> list[str]:
        """Return one reason for each form of `geometry` that `BackendInfo` does not claim."""
        forms = [form for form in geometry.forms if form not in self.info.forms]
        return [f"form {form.value} is not accepted: it is not in BackendInfo.forms" for form in forms]

    def _unclaimed_rows(self, geometry: Geometry) -> list[str]:
        """Return one reason if `BackendInfo` does not claim the rows of `geometry`, or their chosen keys."""
        a = geometry.attention
        if a.chosen_width and not self.info.chosen_keys:
            return ["chosen keys are not served: BackendInfo.chosen_keys is False"]
        if a.latent and not self.info.latent:
            return ["latent attention is not served: BackendInfo.latent is False"]
        if a.row_format not in self.info.row_formats:
            return [f"row format {a.row_format} is not served: it is not in BackendInfo.row_formats"]
        if a.latent or a.value_width == a.head_dim or self.info.narrow_values:
            return []
        widths = f"values of {a.value_width} elements with keys of {a.head_dim}"
        return [f"{widths} are not served: BackendInfo.narrow_values is False"]

    def require(self, geometry: Geometry) -> None:
        """Raise `BackendRefusal` with the backend's reasons unless the backend serves `geometry`."""
        reasons = self.supports(geometry)
        exact = not reasons and self.requirements(geometry).host_lengths is HostLengthsNeed.EXACT
        if exact and geometry.limits.host_lags:
            reasons = [
                "it needs exact host lengths, but the host lags behind the device; set overlap=False or host_lag=False"
            ]
        if reasons:
            raise BackendRefusal(self.name, reasons)

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """Return the validated specifications of the buffers to allocate for `geometry`."""
        return self._specs("buffers", geometry)

    def requirements(self, geometry: Geometry) -> Requirements:
        """Return what the engine must provide for `geometry`."""
        found: Requirements = self._call("requirements", Requirements, geometry=geometry)
        if not isinstance(found.host_lengths, HostLengthsNeed) or not isinstance(found.unique_slots, bool):
            raise self._wrong_return("requirements", "Requirements(HostLengthsNeed, bool)", found)
        return found

    def warm(
        self, geometries: Sequence[Geometry | StateGeometry], progress: Progress | None = None
    ) -> WarmedKernels | None:
        """Compile every kernel of the geometries that is not stored yet; None if the backend has no kernels to compile.

        Args:
            progress: called after each compiled kernel.

        Raises:
            BackendRefusal: the backend does not serve one of the geometries.
            BackendLoadError: a vendor package is absent.
        """
        for geometry in geometries:
            if isinstance(geometry, StateGeometry):
                self.require_state(geometry)
            else:
                self.require(geometry)
        self.require_packages()
        found: WarmedKernels | None = self._offer(
            "warm", geometries=tuple(geometries), progress=progress or (lambda done, count, kernel: None)
        )
        if found is not None and not isinstance(found, WarmedKernels):
            raise self._wrong_return("warm", "WarmedKernels or None", found)
        return found

    def explain(self, geometry: Geometry, batch: BatchSize) -> list[KernelChoice] | None:
        """Return the choices that lead to the kernels of a batch, in their order; None if the backend has none.

        Raises:
            BackendRefusal: the backend does not serve `geometry`.
        """
        self.require(geometry)
        found = self._offer("explain", geometry=geometry, batch=batch)
        if found is not None and not (isinstance(found, list) and all(isinstance(one, KernelChoice) for one in found)):
            raise self._wrong_return("explain", "a list of KernelChoice or None", found)
        return found

    # -- device -------------------------------------------------------------------------------------------

    def allocate(self, geometry: Geometry, device: torch.device | str, *, guard: bool | None = None) -> Arena:
        """Allocate the buffers of `geometry` on `device`; the caller owns the arena and keeps it alive.

        Args:
            geometry: shapes and limits that the buffers are sized for.
            device: device of all buffers that are not pinned.
            guard: put guard words around every buffer and poison fresh memory; None reads DRAFTMARK_GUARD.

        Raises:
            BackendRefusal: the backend does not serve `geometry`.
            BackendLoadError: a vendor package or the device is absent.
        """
        self.require(geometry)
        self.require_runtime(device)
        from .arena import Arena

        return Arena.allocate(self.buffers(geometry), device, guard=guard)

    def bind(self, geometry: Geometry, arena: Arena, *, checked: bool | None = None) -> BoundBackend:
        """Return the backend object that the step loop calls, bound to an arena of `allocate` for `geometry`.

        Args:
            checked: check each call's order, shapes and contents; this reads the device in eager steps. None checks
                if the arena has guard words.

        Raises:
            BackendRefusal: `BackendInfo` does not claim the forms, latent rows, row format, chosen keys or narrow
                values of the geometry.
        """
        from .backend import AttentionBackend

        if isinstance(geometry, Geometry):  # else the hook's call refuses it
            unclaimed = self._unclaimed_rows(geometry) or self._unclaimed_forms(geometry)[:1]
            if unclaimed:
                raise BackendRefusal(self.name, unclaimed)
        backend = self._opened("open_backend", geometry, arena, AttentionBackend)
        is_checked, a = arena.guarded if checked is None else checked, geometry.attention
        logger.info(
            "backend %s serves %s/%s heads of %s on %s, modes %s%s",
            self.name, a.num_qo_heads, a.num_kv_heads, a.head_dim, geometry.device.kind, ", ".join(geometry.modes),
            "; every call is checked" if is_checked else "",
        )  # fmt: skip
        if not is_checked:
            return cast("BoundBackend", backend)
        null_pages = geometry.null_pages(self.requirements(geometry).unique_slots)
        from .guard import guard_checks

        guarded: BoundBackend = guard_checks().GuardedBackend(backend, geometry, null_pages, lse=self.info.lse)
        return guarded

    def open(
        self,
        geometry: Geometry,
        device: torch.device | str,
        *,
        guard: bool | None = None,
        checked: bool | None = None,
    ) -> BoundBackend:
        """Allocate the buffers and bind the backend in one call, for a caller that does not need the arena.

        Args:
            guard: see `allocate`.
            checked: see `bind`.
        """
        return self.bind(geometry, self.allocate(geometry, device, guard=guard), checked=checked)

    def prepare(self, geometries: Sequence[Geometry | StateGeometry], device: torch.device | str) -> None:
        """Compile the missing kernels of all geometries together, before `bind` loads them; nothing on a CPU.

        Without this call, `bind` compiles the kernels of one geometry after another. With DRAFTMARK_PREPARE=0 both
        compile nothing, so each kernel compiles when it is launched.
        """
        import torch

        if prepares_kernels() and torch.device(device).type != "cpu":
            self.warm(geometries)

    def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """Return a new graph state for `device`."""
        from .graphs import GraphState

        state: GraphState = self._call("graph_state", object, geometry=geometry, device=device)
        if not isinstance(state, GraphState):
            raise self._wrong_return("graph_state", "a GraphState (capture, replay, keys, pool_bytes)", state)
        logger.info("backend %s records graphs with %s on %s", self.name, type(state).__name__, device)
        return state

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps:
        """Return the backend's draft-tree kernels on `device`, or torch operations if it has none."""
        from .tree import ParentTreeOps, TorchTreeOps, TreeOps

        offered = self._offer("tree_ops", geometry=geometry, device=device)
        if offered is None:
            return TorchTreeOps(geometry)
        if not isinstance(offered, TreeOps):
            raise self._wrong_return("tree_ops", "a TreeOps (write_tail, verify_tree, compact)", offered)
        from .guard import guard_checks, guarding

        kinds = TorchTreeOps, ParentTreeOps
        ops: TreeOps = offered if isinstance(offered, kinds) else ParentTreeOps(offered)
        if not guarding():
            return ops
        guarded: TreeOps = guard_checks().GuardedTreeOps(ops, geometry)
        return guarded
