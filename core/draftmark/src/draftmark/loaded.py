"""A loaded backend: its hooks as checked, plain methods.

No torch import: `info`, `supports`, `requirements` and `buffers` serve `draftmark list` and `draftmark size`
where torch cannot be imported. `open` binds the backend to a device and is the only method that needs one.
"""

from __future__ import annotations

import importlib.metadata as md
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from .buffers import BufferSpec, validate_specs
from .errors import BackendHookError, BackendLoadError, BackendRefusal, BufferError, DraftmarkError, LoadFailure
from .geometry import Form, Geometry, Mode
from .hookspecs import PREFIX, BackendInfo
from .plugin import BackendPlugin
from .registration import one_line, plugin_of, register
from .requirements import HostLengthsNeed, Requirements

if TYPE_CHECKING:
    import torch

    from .arena import Arena
    from .backend import AttentionBackend
    from .graphs import GraphState
    from .tree import TreeOps

INFO_FIELDS: tuple[tuple[str, type | tuple[type], str], ...] = (
    ("device", str, "a text such as 'cuda'"),
    ("contract_minor", int, "an integer"),
    ("host_kernels", bool, "True or False"),
    ("runtime", (str,), "a tuple of import names"),
    ("install", str, "a text"),
    ("summary", str, "a text"),
    ("runs_code_of", (str,), "a tuple of backends' names"),
    ("modes", (Mode,), "a tuple of Mode"),
    ("forms", (Form,), "a tuple of Form"),
    ("sinks", bool, "True or False"),
)
"""Fields of a `BackendInfo`: a type, or a tuple of one for a tuple of such; and how an error says it."""


class LoadedBackend:
    """One plugin, alone in its own plugin manager.

    Every method raises `BackendHookError` (``hook raised`` or ``wrong return type``) instead of whatever the
    plugin raised, so that one broken plugin reads like any other failure.

    Attributes:
        name: the entry point's name.
        plugin: what the entry point named: a `BackendPlugin`, a module or another object with hooks.
        info: who the backend says it is.
    """

    def __init__(self, name: str, plugin: object) -> None:
        self.name = name
        self.plugin = plugin
        self._hooks = register(name, plugin)
        self.info: BackendInfo = self._call("describe", BackendInfo)
        if self.info.name != name:
            raise BackendLoadError(
                name,
                LoadFailure.WRONG_RETURN,
                f"describe() says its name is {self.info.name!r}",
                "make BackendInfo.name equal to the entry point's name",
            )
        for field, kind, words in INFO_FIELDS:
            value = getattr(self.info, field)
            if not _is_of(value, kind):
                raise self._wrong_return("describe", f"a BackendInfo whose {field} is {words}", value)

    @classmethod
    def from_entry_point(cls, entry: md.EntryPoint) -> LoadedBackend:
        """Import one entry point and check it; a class is called without arguments.

        Raises:
            BackendLoadError: import error, missing hook, unknown hook or wrong signature.
        """
        return cls(entry.name, plugin_of(entry))

    # -- integers, no device ------------------------------------------------------------------------------

    def supports(self, geometry: Geometry) -> list[str]:
        """Return the reasons why `geometry` is not served; an empty list means that it is."""
        reasons: list[str] = self._call("supports", list, geometry=geometry)
        if not all(isinstance(reason, str) and reason for reason in reasons):
            raise self._wrong_return("supports", "sentences (non-empty str)", reasons)
        return self._undeclared(geometry) + reasons

    def _undeclared(self, geometry: Geometry) -> list[str]:
        """Return a reason for each mode and form of `geometry` that the backend does not claim, and for sinks."""
        modes = [mode for mode in geometry.modes if mode not in self.info.modes]
        forms = [form for form in geometry.forms if form not in self.info.forms]
        sinks = geometry.attention.sinks and not self.info.sinks
        return [
            *(f"mode {mode.value} is not served: it is not among BackendInfo.modes" for mode in modes),
            *(f"{form.value} is not taken: it is not among BackendInfo.forms" for form in forms),
            *(["attention sinks are not served: BackendInfo.sinks is not set"] if sinks else []),
        ]

    def require(self, geometry: Geometry) -> None:
        """Raise `BackendRefusal` with the backend's own reasons unless it serves `geometry`."""
        reasons = self.supports(geometry)
        exact = not reasons and self.requirements(geometry).host_lengths is HostLengthsNeed.EXACT
        if exact and geometry.limits.host_lags:
            reasons = [
                "it needs exact host lengths, which a host that lags cannot give: use overlap=False, or host_lag=False"
            ]
        if reasons:
            raise BackendRefusal(self.name, reasons)

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """Return the buffers to allocate for `geometry`, validated."""
        specs: list[BufferSpec] = self._call("buffers", list, geometry=geometry)
        try:
            validate_specs(specs)
        except BufferError as error:
            raise self._failed("buffers", LoadFailure.WRONG_RETURN, f"returned a bad buffer: {error}") from error
        return specs

    def requirements(self, geometry: Geometry) -> Requirements:
        """Return what the engine must give for `geometry`."""
        found: Requirements = self._call("requirements", Requirements, geometry=geometry)
        if not isinstance(found.host_lengths, HostLengthsNeed) or not isinstance(found.unique_slots, bool):
            raise self._wrong_return("requirements", "Requirements of a HostLengthsNeed and a bool", found)
        return found

    def contract_notes(self) -> object | None:
        """Return what the plugin tells the conformance suite, unread; None where it tells nothing."""
        notes: object | None = self._offer("contract_notes")
        return notes

    @property
    def module(self) -> str:
        """The name of the module that defines the plugin."""
        if isinstance(self.plugin, ModuleType):
            return self.plugin.__name__
        if isinstance(self.plugin, BackendPlugin):
            return type(self.plugin).__module__
        return str(self.implementation("describe").__module__)

    # -- device -------------------------------------------------------------------------------------------

    def missing_runtime(self) -> list[str]:
        """Those of `BackendInfo.runtime` that are not installed. Imports nothing."""
        return [name for name in self.info.runtime if importlib.util.find_spec(name.partition(".")[0]) is None]

    def require_runtime(self, device: torch.device | str) -> None:
        """Raise `BackendLoadError` unless the vendor runtime and the device are there."""
        missing = self.missing_runtime()
        if missing:
            remedy = self.info.install or f"install {', '.join(missing)}"
            raise BackendLoadError(
                self.name, LoadFailure.RUNTIME_ABSENT, f"{', '.join(missing)} is not installed", remedy
            )
        from .devices import import_device_type, require_device

        import_device_type(self.name, self.info)

        require_device(self.name, self.info, device)

    def allocate(self, geometry: Geometry, device: torch.device | str, *, guard: bool | None = None) -> Arena:
        """Allocate the buffers of `geometry` on `device`; the caller owns the arena and keeps it alive.

        `guard` puts guard words around every buffer and poisons fresh memory; None reads DRAFTMARK_GUARD.

        Raises:
            BackendRefusal: the backend does not serve `geometry`.
            BackendLoadError: the vendor runtime or the device is absent.
        """
        self.require(geometry)
        self.require_runtime(device)
        from .arena import Arena

        return Arena.allocate(self.buffers(geometry), device, guard=guard)

    def bind(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Bind the backend to buffers that `allocate` made for the same geometry; return its step-path object."""
        from .backend import AttentionBackend

        backend: AttentionBackend = self._call("open_backend", object, geometry=geometry, arena=arena)
        if not isinstance(backend, AttentionBackend):
            raise self._wrong_return("open_backend", "an AttentionBackend (plan, write_metadata, …)", backend)
        return backend

    def open(self, geometry: Geometry, device: torch.device | str, *, guard: bool | None = None) -> AttentionBackend:
        """Allocate and bind in one call, for a caller who never looks at the arena."""
        return self.bind(geometry, self.allocate(geometry, device, guard=guard))

    def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """Return a fresh graph state for `device`."""
        from .graphs import GraphState

        state: GraphState = self._call("graph_state", object, geometry=geometry, device=device)
        if not isinstance(state, GraphState):
            raise self._wrong_return("graph_state", "a GraphState (capture, replay, keys, pool_bytes)", state)
        return state

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps:
        """Return the backend's kernels for draft trees on `device`, or torch's operations if it offers none."""
        from .tree import TorchTreeOps, TreeOps

        offered = self._offer("tree_ops", geometry=geometry, device=device)
        if offered is None:
            return TorchTreeOps(geometry)
        if not isinstance(offered, TreeOps):
            raise self._wrong_return("tree_ops", "a TreeOps (write_tail, verify_tree, compact)", offered)
        return offered

    def implementation(self, hook: str) -> Callable[..., Any]:
        """Return the plugin's own function for a hook, e.g. ``"buffers"``; the conformance suite calls it unchecked."""
        function: Callable[..., Any] = getattr(self._hooks, PREFIX + hook).get_hookimpls()[0].function
        return function

    # -- calls --------------------------------------------------------------------------------------------

    def _call(self, hook: str, returns: type, **arguments: Any) -> Any:
        result = self._offer(hook, **arguments)
        if result is None or not isinstance(result, returns):
            raise self._wrong_return(hook, returns.__name__, result)
        return result

    def _offer(self, hook: str, **arguments: Any) -> Any:
        """Call a hook; return None where an optional one is not implemented."""
        try:
            return getattr(self._hooks, PREFIX + hook)(**arguments)
        except DraftmarkError:
            raise
        except (Exception, SystemExit) as error:  # a plugin may raise anything; the caller reads one kind of failure
            remedy = "report it to the plugin's authors" + (" with this geometry" if "geometry" in arguments else "")
            raise self._failed(hook, LoadFailure.HOOK_RAISED, f"raised {one_line(error)}", remedy) from error

    def _wrong_return(self, hook: str, expected: str, got: object) -> BackendLoadError | BackendHookError:
        return self._failed(hook, LoadFailure.WRONG_RETURN, f"must return {expected}, got {got!r}")

    def _failed(
        self, hook: str, failure: LoadFailure, what: str, remedy: str = "fix the plugin"
    ) -> BackendLoadError | BackendHookError:
        """The error for a hook that failed: nothing is loaded before `describe` has answered."""
        if hook == "describe":
            return BackendLoadError(self.name, failure, f"{hook}() {what}", remedy)
        return BackendHookError(self.name, hook, failure, what, remedy)


def _is_of(value: object, kind: type | tuple[type]) -> bool:
    """Whether it is of a type, or a tuple of such. A text is no tuple of its letters, and True no integer."""
    if isinstance(kind, tuple):
        return isinstance(value, tuple) and all(isinstance(one, kind) for one in value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
