"""The pluggy hooks of a backend: six required and seven optional.

Hooks run at start-up only, because a pluggy call costs more than a microsecond. The step loop calls the plain methods
of `draftmark.runtime.AttentionBackend` instead. Hooks have no default arguments; new inputs become dataclass fields.

An entry point in the group ``draftmark.backends.v1`` names a backend; the group's number is the contract major.
The entry point names a class derived from `draftmark.BackendPlugin`, which implements every hook. An object or a
module with functions decorated by `hookimpl` works too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pluggy

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

PREFIX = "draftmark_"

hookspec = pluggy.HookspecMarker("draftmark")
hookimpl = pluggy.HookimplMarker("draftmark")


@hookspec(firstresult=True)
def draftmark_describe() -> BackendInfo:  # type: ignore[empty-body]
    """Return the backend's name, device and capabilities. Must not import a vendor package."""


@hookspec(firstresult=True)
def draftmark_supports(geometry: Geometry) -> list[str]:  # type: ignore[empty-body]
    """Return why the backend does not serve `geometry`; an empty list means it does. Must not import torch."""


@hookspec(firstresult=True)
def draftmark_requirements(geometry: Geometry) -> Requirements:  # type: ignore[empty-body]
    """Return what the engine must provide, e.g. prefix lengths on the host. Must not import torch."""


@hookspec(firstresult=True)
def draftmark_buffers(geometry: Geometry) -> list[BufferSpec]:  # type: ignore[empty-body]
    """Return the specifications of all buffers, which never move after capture. Must not import torch."""


@hookspec(firstresult=True)
def draftmark_open_backend(geometry: Geometry, arena: Arena) -> AttentionBackend:  # type: ignore[empty-body]
    """Return the backend object that the step loop calls, bound to its buffers in `arena`.

    May run on another thread than the object's methods; see `draftmark.runtime.AttentionBackend`.
    """


@hookspec(firstresult=True)
def draftmark_graph_state(geometry: Geometry, device: torch.device) -> GraphState:  # type: ignore[empty-body]
    """Return a new graph state for `device`, which captures graphs and replays them by key."""


@hookspec(firstresult=True)
def draftmark_tree_ops(geometry: Geometry, device: torch.device) -> TreeOps:  # type: ignore[empty-body]
    """Return the backend's kernels for draft trees on `device`. Optional.

    The core uses torch operations when the hook is absent or returns None.
    """


@hookspec(firstresult=True)
def draftmark_contract_notes() -> object:
    """Return notes that only the conformance suite reads: the meaning of buffers, and their bytes in use. Optional.

    See `draftmark_contract.notes`. Without notes the suite counts the checks that need them as not judged.
    """


@hookspec(firstresult=True)
def draftmark_warm(geometries: Sequence[Geometry], progress: Progress) -> WarmedKernels:  # type: ignore[empty-body]
    """Compile every kernel of the geometries that is not stored yet, without a device. Optional.

    A plugin omits the hook, or returns None, when it has no kernels to compile. `open_backend` loads what this stores.
    """


@hookspec(firstresult=True)
def draftmark_explain(geometry: Geometry, batch: BatchSize) -> list[KernelChoice]:  # type: ignore[empty-body]
    """Return the choices that lead to the kernels of a batch, in their order. Needs no device. Optional."""


@hookspec(firstresult=True)
def draftmark_state_supports(geometry: StateGeometry) -> list[str]:  # type: ignore[empty-body]
    """Return why the backend does not serve layers with this state; an empty list means it does. Optional.

    Must not import torch. The core asks only for recurrences in `BackendInfo.recurrences`.
    """


@hookspec(firstresult=True)
def draftmark_state_buffers(geometry: StateGeometry) -> list[BufferSpec]:  # type: ignore[empty-body]
    """Return the buffers of all layers with this state, which never move after capture. Optional.

    They hold what the rows of a verify leave until the commit: states, or records of rows.
    """


@hookspec(firstresult=True)
def draftmark_open_state(geometry: StateGeometry, arena: Arena) -> StateBackend:  # type: ignore[empty-body]
    """Return the object that the step loop calls for layers with this state, bound to its buffers. Optional."""


STATE_HOOKS = ("state_supports", "state_buffers", "open_state")
"""Names of the hooks that get a `StateGeometry`."""
OPTIONAL_HOOKS: tuple[str, ...] = tuple(
    PREFIX + name for name in sorted(("contract_notes", "explain", "tree_ops", "warm", *STATE_HOOKS))
)
"""Hooks that a backend may omit."""
HOOKS: tuple[str, ...] = tuple(
    sorted(name for name in globals() if name.startswith(PREFIX) and name not in OPTIONAL_HOOKS)
)
"""The six required hooks."""


def hook_arguments() -> dict[str, tuple[str, ...]]:
    """Return the argument names of each hook, for error messages."""
    functions: dict[str, Any] = {name: globals()[name] for name in HOOKS + OPTIONAL_HOOKS}
    return {name: f.__code__.co_varnames[: f.__code__.co_argcount] for name, f in functions.items()}
