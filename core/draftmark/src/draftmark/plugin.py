"""Base class of backend plugins, with a default for every hook except `buffers` and `open_backend`.

pluggy finds the ``draftmark_*`` methods. Each calls the method without the prefix, which a subclass overrides.
A plugin may be imported without torch installed, so it imports torch and vendor packages only inside `open_backend`,
`graph_state`, `tree_ops`, `warm` and `explain`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .backend_info import BackendInfo
from .buffers import BufferSpec
from .geometry import Geometry, StateGeometry
from .hookspecs import hookimpl
from .kernels import BatchSize, KernelChoice, Progress, WarmedKernels
from .requirements import Requirements

if TYPE_CHECKING:
    import torch

    from .arena import Arena
    from .backend import AttentionBackend
    from .graphs import GraphState
    from .state import StateBackend
    from .tree import TreeOps

NOTES = "contract"
"""Module of a plugin's package that only the conformance suite reads."""


class BackendPlugin(ABC):
    """Base class of a hardware backend, named by an entry point ``NAME = "package:Class"``.

    A subclass defines `info`, `buffers` and `open_backend`, and overrides the defaults that do not fit. It keeps no
    state: every return value depends on the arguments only.

    Attributes:
        info: name, device and capabilities of the backend.
    """

    info: BackendInfo

    def supports(self, geometry: Geometry) -> list[str]:
        """Return the reasons why the backend does not serve `geometry`, as sentences. Default: an empty list."""
        return []

    def requirements(self, geometry: Geometry) -> Requirements:
        """Return what the engine must provide. Default: no host lengths, and one null page for all padding."""
        return Requirements()

    @abstractmethod
    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """Return the specifications of all buffers, which never move after capture. Must not import torch."""

    @abstractmethod
    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Return the backend object that the step loop calls, bound to the buffers that `buffers` declares."""

    def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """Return a new graph state. Default: CUDA graphs on CUDA, recorded graphs on other devices."""
        from .graphs import graph_state_for

        return graph_state_for(device)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps | None:
        """Return the backend's kernels for draft trees, or None (the default) to use torch operations."""
        return None

    def warm(self, geometries: Sequence[Geometry], progress: Progress) -> WarmedKernels | None:
        """Compile every kernel of the geometries that is not stored yet, without a device.

        Default: None, for a plugin without kernels to compile.

        Args:
            progress: called after each compiled kernel.
        """
        return None

    def explain(self, geometry: Geometry, batch: BatchSize) -> list[KernelChoice] | None:
        """Return the choices that lead to the kernels of a batch, in their order, without a device. Default: None."""
        return None

    def state_supports(self, geometry: StateGeometry) -> list[str]:
        """Return the reasons why layers with this state are not served, as sentences. Default: an empty list.

        The core asks only for recurrences in `BackendInfo.recurrences`.
        """
        return []

    def state_buffers(self, geometry: StateGeometry) -> list[BufferSpec]:
        """Return the buffers of all layers with this state. Default: none. Must not import torch."""
        return []

    def open_state(self, geometry: StateGeometry, arena: Arena) -> StateBackend:
        """Return the object that the step loop calls for layers with this state, bound to the state buffers.

        A plugin that lists a recurrence in `BackendInfo.recurrences` overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} lists a recurrence, but does not define open_state")

    def contract_notes(self) -> object | None:
        """Return notes that only the conformance suite reads; see `draftmark_contract.notes`.

        Default: the module ``contract`` in the package of the plugin class or of its nearest base class that has one.
        None when there is no such module.
        """
        for owner in type(self).__mro__:
            if owner is BackendPlugin:
                break
            package = sys.modules[owner.__module__].__package__
            if package and importlib.util.find_spec(f"{package}.{NOTES}") is not None:
                return importlib.import_module(f"{package}.{NOTES}")
        return None

    # -- the hooks that pluggy finds ----------------------------------------------------------------------

    @hookimpl
    def draftmark_describe(self) -> BackendInfo:
        """Return `info`."""
        return self.info

    @hookimpl
    def draftmark_supports(self, geometry: Geometry) -> list[str]:
        """Call `supports`."""
        return self.supports(geometry)

    @hookimpl
    def draftmark_requirements(self, geometry: Geometry) -> Requirements:
        """Call `requirements`."""
        return self.requirements(geometry)

    @hookimpl
    def draftmark_buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """Call `buffers`."""
        return self.buffers(geometry)

    @hookimpl
    def draftmark_open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Call `open_backend`."""
        return self.open_backend(geometry, arena)

    @hookimpl
    def draftmark_graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """Call `graph_state`."""
        return self.graph_state(geometry, device)

    @hookimpl
    def draftmark_tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps | None:
        """Call `tree_ops`."""
        return self.tree_ops(geometry, device)

    @hookimpl
    def draftmark_warm(self, geometries: Sequence[Geometry], progress: Progress) -> WarmedKernels | None:
        """Call `warm`."""
        return self.warm(geometries, progress)

    @hookimpl
    def draftmark_explain(self, geometry: Geometry, batch: BatchSize) -> list[KernelChoice] | None:
        """Call `explain`."""
        return self.explain(geometry, batch)

    @hookimpl
    def draftmark_state_supports(self, geometry: StateGeometry) -> list[str]:
        """Call `state_supports`."""
        return self.state_supports(geometry)

    @hookimpl
    def draftmark_state_buffers(self, geometry: StateGeometry) -> list[BufferSpec]:
        """Call `state_buffers`."""
        return self.state_buffers(geometry)

    @hookimpl
    def draftmark_open_state(self, geometry: StateGeometry, arena: Arena) -> StateBackend:
        """Call `open_state`."""
        return self.open_state(geometry, arena)

    @hookimpl
    def draftmark_contract_notes(self) -> object | None:
        """Call `contract_notes`."""
        return self.contract_notes()
