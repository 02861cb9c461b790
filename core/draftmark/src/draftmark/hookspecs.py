"""The hooks of a backend, six required and two optional.

pluggy serves at start-up only: a hook call costs over a microsecond, so the step loop calls the plain methods
of `draftmark.runtime.AttentionBackend` instead. Hooks take no default arguments; dataclasses grow.

A backend is named by an entry point in the group ``draftmark.backends.v1``, which carries the contract's major. It is
a class derived from `draftmark.BackendPlugin`, which implements every hook; an object or a module whose functions
carry `hookimpl` serves as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from .buffers import BufferSpec
from .geometry import CORE_MODES, Form, Geometry, Mode
from .requirements import Requirements

if TYPE_CHECKING:
    import torch

    from .arena import Arena
    from .backend import AttentionBackend
    from .graphs import GraphState
    from .tree import TreeOps

PREFIX = "draftmark_"

hookspec = pluggy.HookspecMarker("draftmark")
hookimpl = pluggy.HookimplMarker("draftmark")


@dataclass(frozen=True)
class BackendInfo:
    """Who a backend is.

    Attributes:
        name: the entry point's name.
        device: torch device type it runs on (``"cuda"``, ``"npu"``), or ``"any"``.
        contract_minor: newest contract minor the plugin was written for; later checks are reported as upcoming.
        host_kernels: its kernels also run on CPU tensors (natively or in an interpreter).
        runtime: import names that must be present before a device is used, e.g. ``("flashinfer",)``.
        install: the pip command that brings the runtime.
        summary: one line for `draftmark list`.
        runs_code_of: names of other backends whose code runs as part of this one, e.g. ``("cuda_triton",)``; a verdict
            on this backend holds for their present code too.
        modes: what it serves; a geometry with another mode is refused by name.
        forms: what it takes of an engine's own; a geometry with another form is refused by name.
        sinks: its `attend` counts `KVCache.sinks` in; without it a geometry whose layers have sinks is refused.
    """

    name: str
    device: str
    contract_minor: int
    host_kernels: bool
    runtime: tuple[str, ...] = ()
    install: str = ""
    summary: str = ""
    runs_code_of: tuple[str, ...] = ()
    modes: tuple[Mode, ...] = CORE_MODES
    forms: tuple[Form, ...] = ()
    sinks: bool = False


@hookspec(firstresult=True)
def draftmark_describe() -> BackendInfo:  # type: ignore[empty-body]
    """Say who the backend is. Must not import a vendor package."""


@hookspec(firstresult=True)
def draftmark_supports(geometry: Geometry) -> list[str]:  # type: ignore[empty-body]
    """Return the reasons why the geometry is not served; an empty list means that it is. Must not import torch."""


@hookspec(firstresult=True)
def draftmark_requirements(geometry: Geometry) -> Requirements:  # type: ignore[empty-body]
    """Say what the engine must give: lengths on the host, null pages by request. Must not import torch."""


@hookspec(firstresult=True)
def draftmark_buffers(geometry: Geometry) -> list[BufferSpec]:  # type: ignore[empty-body]
    """Name every buffer that must exist before capture and never move. Must not import torch."""


@hookspec(firstresult=True)
def draftmark_open_backend(geometry: Geometry, arena: Arena) -> AttentionBackend:  # type: ignore[empty-body]
    """Return the step-path object, bound to its buffers in `arena`."""


@hookspec(firstresult=True)
def draftmark_graph_state(geometry: Geometry, device: torch.device) -> GraphState:  # type: ignore[empty-body]
    """Return a fresh graph state for the device, which captures and replays by key."""


@hookspec(firstresult=True)
def draftmark_tree_ops(geometry: Geometry, device: torch.device) -> TreeOps:  # type: ignore[empty-body]
    """Return kernels for what the decoding loop does with draft trees on the device. Optional.

    Without it, or where it returns None, torch operations serve.
    """


@hookspec(firstresult=True)
def draftmark_contract_notes() -> object:
    """Return what only the conformance suite reads: the meaning of buffers, bytes in use. Optional.

    See `draftmark_contract.notes`. Without it the suite judges what it can and counts the rest as not judged.
    """


OPTIONAL_HOOKS: tuple[str, ...] = (f"{PREFIX}contract_notes", f"{PREFIX}tree_ops")
"""Hooks that a backend may leave out."""
HOOKS: tuple[str, ...] = tuple(
    sorted(name for name in globals() if name.startswith(PREFIX) and name not in OPTIONAL_HOOKS)
)
"""The required hooks, all six."""


def hook_arguments() -> dict[str, tuple[str, ...]]:
    """The argument names of each hook, for messages."""
    functions: dict[str, Any] = {name: globals()[name] for name in HOOKS + OPTIONAL_HOOKS}
    return {name: f.__code__.co_varnames[: f.__code__.co_argcount] for name, f in functions.items()}
