"""Base class of backend plugins, with a default for every hook except `buffers` and `open_backend`.

Each public method is a hook, which the core calls at start-up only. A plugin may be imported without torch installed,
so it imports torch and vendor packages only inside `open_backend`, `graph_state`, `tree_ops`, `warm` and `explain`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .backend_info import BackendInfo
from .buffers import BufferSpec
from .geometry import Geometry, StateGeometry
from .kernels import BatchSize, KernelChoice, Progress, WarmedKernels
from .requirements import Requirements

if TYPE_CHECKING:
    import torch

    from .arena import Arena
    from .backend import AttentionBackend
    from .graphs import GraphState
    from .state import StateBackend
    from .tree import TreeOps


class BackendPlugin(ABC):
    """Base class of a hardware backend, named by an entry point ``NAME = "package:Class"``.

    A subclass defines `info`, `buffers` and `open_backend`, and overrides the defaults that do not fit. It keeps no
    state: every return value depends on the arguments only.

    Attributes:
        info: name, device and capabilities of the backend.
    """

    info: BackendInfo

    def describe(self) -> BackendInfo:
        """Return `info`."""
        return self.info

    def supports(self, geometry: Geometry) -> list[str]:
        """Return the reasons why the backend does not serve `geometry`, as sentences. Default: an empty list.

        Must not import torch.
        """
        return []

    def requirements(self, geometry: Geometry) -> Requirements:
        """Return what the engine must provide. Default: no host lengths, and one null page for all padding.

        Must not import torch.
        """
        return Requirements()

    @abstractmethod
    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """Return the specifications of all buffers, which never move after capture. Must not import torch."""

    @abstractmethod
    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Return the backend object that the step loop calls, bound to the buffers that `buffers` declares.

        May run on another thread than the object's methods; see `draftmark.runtime.AttentionBackend`.
        """

    def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """Return a new graph state. Default: CUDA graphs on CUDA, recorded graphs on other devices."""
        from .graphs import graph_state_for

        return graph_state_for(device)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps | None:
        """Return the backend's kernels for draft trees, or None (the default) to use torch operations."""
        return None

    def warm(self, geometries: Sequence[Geometry | StateGeometry], progress: Progress) -> WarmedKernels | None:
        """Compile every kernel of the geometries that is not stored yet, without a device.

        Default: None, for a plugin without kernels to compile. `open_backend` loads what this stores.

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
        """Return the buffers of all layers with this state. Default: none. Must not import torch.

        They hold what the rows of a verify leave until the commit: states, or records of rows.
        """
        return []

    def open_state(self, geometry: StateGeometry, arena: Arena) -> StateBackend:
        """Return the object that the step loop calls for layers with this state, bound to the state buffers.

        A plugin that lists a recurrence in `BackendInfo.recurrences` overrides it.
        """
        raise NotImplementedError(f"{type(self).__name__} lists a recurrence, but does not define open_state")
