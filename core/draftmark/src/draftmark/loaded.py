"""A loaded backend: its hooks as checked, plain methods.

No torch import: `describe`, `supports`, `buffers` and `metadata` serve `draftmark list` and `draftmark size`
where torch cannot be imported. `open` binds the backend to a device and is the only method that needs one.
"""

from __future__ import annotations

import importlib.metadata as md
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pluggy

from . import hookspecs
from .buffers import BufferSpec, validate_specs
from .errors import BackendLoadError, BackendRefusal, BufferError, DraftmarkError, LoadFailure
from .geometry import Geometry, Mode
from .hookspecs import HOOKS, OPTIONAL_HOOKS, PREFIX, BackendInfo, hook_arguments
from .metadata import HostLengthsNeed, MetadataSpec
from .version import CONTRACT_MAJOR, CONTRACT_MINOR

if TYPE_CHECKING:
    import torch

    from .arena import Arena
    from .backend import AttentionBackend
    from .batch import ForwardBatch
    from .graphs import GraphState
    from .tree import TreeOps


class LoadedBackend:
    """One plugin, alone in its own plugin manager.

    Every method raises `BackendLoadError` (``hook raised`` or ``wrong return type``) instead of whatever the
    plugin raised, so that one broken plugin reads like any other failure.
    """

    def __init__(self, name: str, plugin: object) -> None:
        self.name = name
        self._hooks = _register(name, plugin)
        self.info: BackendInfo = self._call("describe", BackendInfo)
        if self.info.name != name:
            raise BackendLoadError(
                name,
                LoadFailure.WRONG_RETURN,
                f"describe() says its name is {self.info.name!r}",
                "make BackendInfo.name equal to the entry point's name",
            )

    @classmethod
    def from_entry_point(cls, entry: md.EntryPoint) -> LoadedBackend:
        """Import one entry point and check it.

        Raises:
            BackendLoadError: import error, missing hook, unknown hook or wrong signature.
        """
        try:
            plugin = entry.load()
        except (Exception, SystemExit) as error:  # a plugin may raise anything while it is imported
            raise BackendLoadError(
                entry.name,
                LoadFailure.IMPORT_ERROR,
                f"importing {entry.value} raised {_one_line(error)}",
                "reinstall the plugin, and keep vendor imports inside open_backend and graph_state",
            ) from error
        return cls(entry.name, plugin)

    # -- integers, no device ------------------------------------------------------------------------------

    def supports(self, geometry: Geometry) -> list[str]:
        """Reasons why not; empty means yes."""
        reasons: list[str] = self._call("supports", list, geometry=geometry)
        if not all(isinstance(reason, str) and reason for reason in reasons):
            raise self._wrong_return("supports", "sentences (non-empty str)", reasons)
        return reasons

    def require(self, geometry: Geometry) -> None:
        """Raise `BackendRefusal` with the backend's own reasons unless it serves `geometry`."""
        reasons = self.supports(geometry)
        if not reasons and self.host_lengths(geometry) is HostLengthsNeed.EXACT and geometry.limits.overlap:
            reasons = ["it needs exact host lengths, which overlap cannot give: use overlap=False"]
        if reasons:
            raise BackendRefusal(self.name, reasons)

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        """The buffers to allocate for `geometry`, validated."""
        specs: list[BufferSpec] = self._call("buffers", list, geometry=geometry)
        try:
            validate_specs(specs)
        except BufferError as error:
            remedy = "mend the plugin's sizing"
            raise BackendLoadError(self.name, LoadFailure.WRONG_RETURN, str(error), remedy) from error
        return specs

    def metadata(self, geometry: Geometry) -> dict[Mode, MetadataSpec]:
        """What the metadata means, per served mode."""
        spec: dict[Mode, MetadataSpec] = self._call("metadata", dict, geometry=geometry)
        missing = [mode.value for mode in geometry.modes if not isinstance(spec.get(mode), MetadataSpec)]
        if missing:
            raise self._wrong_return("metadata", f"a MetadataSpec for {', '.join(missing)}", sorted(map(str, spec)))
        return spec

    def host_lengths(self, geometry: Geometry) -> HostLengthsNeed:
        """The strongest need for host lengths over the modes that `geometry` serves."""
        metadata = self.metadata(geometry)
        return HostLengthsNeed.strongest(metadata[mode].host_lengths for mode in geometry.modes)

    def unique_slots(self, geometry: Geometry) -> bool:
        """Whether any mode needs unique KV slots for padded rows too; see `Geometry.null_pages`."""
        metadata = self.metadata(geometry)
        return any(metadata[mode].unique_slots for mode in geometry.modes)

    # -- device -------------------------------------------------------------------------------------------

    def require_runtime(self, device: torch.device | str) -> None:
        """Raise `BackendLoadError` unless the vendor runtime and the device are there."""
        missing = [name for name in self.info.runtime if importlib.util.find_spec(name.partition(".")[0]) is None]
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
        """The step-path object over buffers that `allocate` made for the same geometry."""
        from .backend import AttentionBackend

        backend: AttentionBackend = self._call("open_backend", object, geometry=geometry, arena=arena)
        if not isinstance(backend, AttentionBackend):
            raise self._wrong_return("open_backend", "an AttentionBackend (plan, write_metadata, …)", backend)
        return backend

    def open(self, geometry: Geometry, device: torch.device | str, *, guard: bool | None = None) -> AttentionBackend:
        """`allocate` and `bind` in one, for a caller who never looks at the arena."""
        return self.bind(geometry, self.allocate(geometry, device, guard=guard))

    def usage(self, geometry: Geometry, batch: ForwardBatch) -> dict[str, int]:
        """Bytes of each own-role buffer that `batch` uses, by buffer name."""
        used: dict[str, int] = self._call("usage", dict, geometry=geometry, batch=batch)
        return used

    def graph_state(self, geometry: Geometry, device: torch.device) -> GraphState:
        """A fresh graph state for `device`."""
        from .graphs import GraphState

        state: GraphState = self._call("graph_state", object, geometry=geometry, device=device)
        if not isinstance(state, GraphState):
            raise self._wrong_return("graph_state", "a GraphState (capture, replay, keys, pool_bytes)", state)
        return state

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps:
        """The backend's own kernels for draft trees on `device`, or torch's operations if it offers none."""
        from .tree import TorchTreeOps, TreeOps

        offered = self._offer("tree_ops", geometry=geometry, device=device)
        if offered is None:
            return TorchTreeOps(geometry)
        if not isinstance(offered, TreeOps):
            raise self._wrong_return("tree_ops", "a TreeOps (write_tail, verify_tree, compact)", offered)
        return offered

    def implementation(self, hook: str) -> Callable[..., Any]:
        """The plugin's own function for a hook, e.g. ``"buffers"``: unchecked, for those who judge a plugin."""
        function: Callable[..., Any] = getattr(self._hooks, PREFIX + hook).get_hookimpls()[0].function
        return function

    # -- calls --------------------------------------------------------------------------------------------

    def _call(self, hook: str, returns: type, **arguments: Any) -> Any:
        result = self._offer(hook, **arguments)
        if result is None or not isinstance(result, returns):
            raise self._wrong_return(hook, returns.__name__, result)
        return result

    def _offer(self, hook: str, **arguments: Any) -> Any:
        """What a hook returns; None where an optional one is not implemented."""
        try:
            return getattr(self._hooks, PREFIX + hook)(**arguments)
        except DraftmarkError:
            raise
        except (Exception, SystemExit) as error:  # a plugin may raise anything; the caller reads one kind of failure
            raise BackendLoadError(
                self.name,
                LoadFailure.HOOK_RAISED,
                f"{hook}() raised {_one_line(error)}",
                "report it to the plugin's authors with this geometry",
            ) from error

    def _wrong_return(self, hook: str, expected: str, got: object) -> BackendLoadError:
        return BackendLoadError(
            self.name, LoadFailure.WRONG_RETURN, f"{hook}() must return {expected}, got {got!r}", "mend the plugin"
        )


def _register(name: str, plugin: object) -> Any:
    """A manager that holds `plugin` alone; checks hook names and signatures."""
    manager = pluggy.PluginManager("draftmark")
    manager.add_hookspecs(hookspecs)
    # Before 1.7 pluggy raises AttributeError for an absent name.
    named = [hook for hook in HOOKS if hasattr(plugin, hook)]
    present = [hook for hook in named if manager.parse_hookimpl_opts(plugin, hook) is not None]
    missing = [hook for hook in HOOKS if hook not in present]
    if missing:
        raise BackendLoadError(
            name,
            LoadFailure.MISSING_HOOK,
            f"{', '.join(missing)} not implemented",
            "decorate all seven hooks with draftmark.hookimpl",
        )
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise _validation_failure(name, error) from error
    return manager.hook


def _one_line(error: BaseException) -> str:
    """A foreign error as part of a sentence."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _validation_failure(name: str, error: pluggy.PluginValidationError) -> BackendLoadError:
    text = " ".join(str(error).split())
    if "unknown hook" in text:
        known = f"contract v{CONTRACT_MAJOR}.{CONTRACT_MINOR} has: {', '.join(HOOKS + OPTIONAL_HOOKS)}"
        return BackendLoadError(name, LoadFailure.UNKNOWN_HOOK, text, known)
    expected = "; ".join(f"{hook}({', '.join(args)})" for hook, args in hook_arguments().items())
    return BackendLoadError(name, LoadFailure.WRONG_SIGNATURE, text, f"the signatures are {expected}")
