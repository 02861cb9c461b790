"""The class that a backend derives from: every hook with a default, so that a plugin states only what differs.

pluggy finds the marked ``draftmark_*`` methods; each of them calls the plain method of the same name, and that is the
one to override. A plugin is imported where torch may be absent, so torch and the vendor's packages are imported inside
`open_backend`, `graph_state` and `tree_ops`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from .buffers import BufferSpec
from .geometry import Geometry
from .hookspecs import BackendInfo, hookimpl
from .requirements import Requirements

if TYPE_CHECKING:
    import torch

    from .arena import Arena
    from .backend import AttentionBackend
    from .graphs import GraphState
    from .tree import TreeOps

NOTES = "contract"
"""The module of a plugin's package that only the conformance suite reads."""


class BackendPlugin(ABC):
    """One hardware backend, named by an entry point ``NAME = "package:Class"``.

    A subclass gives `info`, `buffers` and `open_backend`, and overrides what differs from the defaults. Keep no state:
    every answer depends on the arguments alone.

    Attributes:
        info: who the backend is.
    """

    info: BackendInfo

    def supports(self, geometry: Geometry) -> list[str]:
        """Return the reasons why `geometry` is not served, as sentences; the default is none: it is served."""
        return []

    def requirements(self, geometry: Geometry) -> Requirements:
        """Say what the engine must give: by default no lengths on the host, and one null page for all padding."""
        return Requirements()

    @abstractmethod
    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """Name every buffer that must exist before capture and never move. Integers only."""

    @abstractmethod
    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Return the step-path object, bound to the buffers that `buffers` named."""

    def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """Return a fresh graph state; by default CUDA graphs on CUDA and recorded graphs elsewhere."""
        from .graphs import graph_state_for

        return graph_state_for(device)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps | None:
        """Return kernels for what a decoding loop does with draft trees; None, the default, leaves it to torch."""
        return None

    def contract_notes(self) -> object | None:
        """Return what only the conformance suite reads; see `draftmark_contract.notes`.

        By default the module ``contract`` beside the one that defines the plugin (or a class that it derives from), and
        None where there is no such module.
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
        """`info`."""
        return self.info

    @hookimpl
    def draftmark_supports(self, geometry: Geometry) -> list[str]:
        """`supports`."""
        return self.supports(geometry)

    @hookimpl
    def draftmark_requirements(self, geometry: Geometry) -> Requirements:
        """`requirements`."""
        return self.requirements(geometry)

    @hookimpl
    def draftmark_buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """`buffers`."""
        return self.buffers(geometry)

    @hookimpl
    def draftmark_open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """`open_backend`."""
        return self.open_backend(geometry, arena)

    @hookimpl
    def draftmark_graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """`graph_state`."""
        return self.graph_state(geometry, device)

    @hookimpl
    def draftmark_tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps | None:
        """`tree_ops`."""
        return self.tree_ops(geometry, device)

    @hookimpl
    def draftmark_contract_notes(self) -> object | None:
        """`contract_notes`."""
        return self.contract_notes()
