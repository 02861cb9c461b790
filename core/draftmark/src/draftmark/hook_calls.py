"""Calls of a plugin's hooks, with checks of every returned value. Does not import torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from .backend_info import BackendInfo
from .buffers import BufferSpec, validate_specs
from .errors import BackendHookError, BackendLoadError, BufferError, DraftmarkError, GeometryError, LoadFailure
from .geometry import BatchGeometry, Form, Geometry, Mode, Recurrence, StateGeometry
from .hookspecs import PREFIX, STATE_HOOKS
from .registration import one_line, register

if TYPE_CHECKING:
    import torch

INFO_KINDS: dict[str, tuple[type | tuple[type], str]] = {
    "str": (str, "a string"),
    "int": (int, "an integer"),
    "bool": (bool, "True or False"),
    "tuple[str, ...]": ((str,), "a tuple of names"),
    **{f"tuple[{kind.__name__}, ...]": ((kind,), f"a tuple of {kind.__name__}") for kind in (Mode, Form, Recurrence)},
}
"""Type and words in errors of a `BackendInfo` field, by its annotation; (T,) stands for a tuple of T."""


class HookCalls:
    """Base of `LoadedBackend`: a plugin's hooks and its `BackendInfo`. Each instance has its own plugin manager.

    Attributes:
        name: name of the entry point.
        plugin: object that the entry point names: a `BackendPlugin`, a module or another object with hooks.
        info: the backend's name, device and capabilities.
    """

    def __init__(self, name: str, plugin: object) -> None:
        self.name = name
        self.plugin = plugin
        self._hooks = register(name, plugin)
        self.info: BackendInfo = self._call("describe", BackendInfo)
        if self.info.name != name:
            what = f"returned the name {self.info.name!r}"
            raise self._failed("describe", LoadFailure.WRONG_RETURN, what, f"set BackendInfo.name to {name!r}")
        for field in fields(BackendInfo):
            value, (kind, words) = getattr(self.info, field.name), INFO_KINDS[str(field.type)]
            if not _is_of(value, kind):
                raise self._wrong_return("describe", f"a BackendInfo in which {field.name} is {words}", value)

    def implementation(self, hook: str) -> Callable[..., Any]:
        """Return the plugin's own function for a hook, e.g. ``"buffers"``, without checks of its return value."""
        function: Callable[..., Any] = getattr(self._hooks, PREFIX + hook).get_hookimpls()[0].function
        return function

    def missing_runtime(self) -> list[str]:
        """Return the names in `BackendInfo.runtime` that are not installed. Imports nothing."""
        return [name for name in self.info.runtime if importlib.util.find_spec(name.partition(".")[0]) is None]

    def require_packages(self) -> None:
        """Raise `BackendLoadError` unless the vendor packages are installed."""
        missing = ", ".join(self.missing_runtime())
        if missing:
            remedy = self.info.install or f"install {missing}"
            raise BackendLoadError(self.name, LoadFailure.RUNTIME_ABSENT, f"{missing} is not installed", remedy)

    def require_runtime(self, device: torch.device | str) -> None:
        """Raise `BackendLoadError` unless the vendor packages are installed and `device` is present."""
        self.require_packages()
        from .devices import import_device_type, require_device

        import_device_type(self.name, self.info)
        require_device(self.name, self.info, device)

    def _call(self, hook: str, returns: type, **arguments: Any) -> Any:
        result = self._offer(hook, **arguments)
        if result is None or not isinstance(result, returns):
            raise self._wrong_return(hook, returns.__name__, result)
        return result

    def _offer(self, hook: str, **arguments: Any) -> Any:
        """Call a hook; return None for an optional hook that the plugin does not implement.

        A wrong geometry is the caller's error, so it raises here, not as an error of the plugin.
        """
        geometry = arguments.get("geometry")
        kind = StateGeometry if hook in STATE_HOOKS else Geometry
        if "geometry" in arguments and not isinstance(geometry, kind):
            raise GeometryError(
                "geometry", geometry, f"it must be a {kind.__name__}", f"write {kind.__name__}.create(…)"
            )
        try:
            return getattr(self._hooks, PREFIX + hook)(**arguments)
        except DraftmarkError:
            raise
        except (Exception, SystemExit) as error:  # a plugin may raise anything; the caller gets one error type
            remedy = "report it to the plugin's authors" + (" with this geometry" if "geometry" in arguments else "")
            raise self._failed(hook, LoadFailure.HOOK_RAISED, f"raised {one_line(error)}", remedy) from error

    def _reasons(self, hook: str, geometry: BatchGeometry, optional: bool = False) -> list[str]:
        """Return the hook's own reasons against `geometry`; none if the hook is optional and absent."""
        found = self._offer(hook, geometry=geometry)
        reasons: list[str] = [] if optional and found is None else found
        if not isinstance(reasons, list) or not all(isinstance(reason, str) and reason for reason in reasons):
            raise self._wrong_return(hook, "a list of sentences (non-empty str)", reasons)
        return reasons

    def _unserved_modes(self, geometry: BatchGeometry) -> list[str]:
        """Return one reason for each mode of `geometry` that `BackendInfo` does not declare."""
        modes = [mode for mode in geometry.modes if mode not in self.info.modes]
        return [f"mode {mode.value} is not served: it is not in BackendInfo.modes" for mode in modes]

    def _opened(self, hook: str, geometry: BatchGeometry, arena: object, protocol: type) -> Any:
        """Return the object with the methods of `protocol` that a hook binds to an arena."""
        from .arena import Arena

        if not isinstance(arena, Arena):
            raise BufferError(f"arena is {arena!r}, but it must be an Arena; pass the result of allocate")
        backend = self._call(hook, object, geometry=geometry, arena=arena)
        if not isinstance(backend, protocol):
            raise self._wrong_return(hook, f"an object with the methods of {protocol.__name__}", backend)
        return backend

    def _specs(self, hook: str, geometry: BatchGeometry) -> list[BufferSpec]:
        """Return the validated buffers of a hook."""
        specs: list[BufferSpec] = self._call(hook, list, geometry=geometry)
        try:
            validate_specs(specs)
        except BufferError as error:
            raise self._failed(hook, LoadFailure.WRONG_RETURN, f"returned a bad buffer: {error}") from error
        return specs

    def _wrong_return(self, hook: str, expected: str, got: object) -> BackendLoadError | BackendHookError:
        return self._failed(hook, LoadFailure.WRONG_RETURN, f"must return {expected}, got {got!r}")

    def _failed(
        self, hook: str, failure: LoadFailure, what: str, remedy: str = "fix the plugin"
    ) -> BackendLoadError | BackendHookError:
        """Return the error for a failed hook. `describe` runs while loading, so its failure is a load error."""
        if hook == "describe":
            return BackendLoadError(self.name, failure, f"{hook}() {what}", remedy)
        return BackendHookError(self.name, hook, failure, what, remedy)


def _is_of(value: object, kind: type | tuple[type]) -> bool:
    """Return True if `value` is an instance of `kind`, or a tuple of T if `kind` is ``(T,)``. A bool is not an int."""
    if isinstance(kind, tuple):
        return isinstance(value, tuple) and all(isinstance(one, kind) for one in value)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
