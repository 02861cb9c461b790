"""Every error that draftmark raises on purpose.

    DraftmarkError
    ├── GeometryError          a shape, limit or draft setting is not valid
    ├── BackendError
    │   ├── BackendLoadError   a backend cannot be found, imported or verified
    │   ├── BackendHookError   a hook of a loaded backend raised, or returned a wrong type
    │   └── BackendRefusal     a loaded backend does not serve a geometry; contains its reasons
    ├── BufferError            a malformed buffer specification, an unknown buffer name or device
    │   └── GuardError         a guard word was overwritten
    ├── BatchError             the tensors of a forward batch contradict each other
    ├── LengthsError           the host lengths of a request are not known well enough
    ├── GraphError             capture or replay out of order
    │   └── CaptureError       a captured region contains an operation that a graph cannot contain
    ├── ModelError             a model or weights file that cannot be run correctly
    └── RequestError           a prompt or a generation setting is out of range

Each message names the thing, the value, the limit and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any

__all__ = [
    "BackendError",
    "BackendHookError",
    "BackendLoadError",
    "BackendRefusal",
    "BatchError",
    "BufferError",
    "CaptureError",
    "DraftmarkError",
    "GeometryError",
    "GraphError",
    "GuardError",
    "LengthsError",
    "LoadFailure",
    "ModelError",
    "RequestError",
]


class DraftmarkError(Exception):
    """Base class of every error that draftmark raises on purpose. Instances can be pickled between processes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception.__reduce__ would call the class with the message only, which fails for classes with several
        # arguments and breaks a process pool without an explanation.
        return _rebuild, (type(self), self.args), self.__dict__


def _rebuild(kind: type[DraftmarkError], args: tuple[Any, ...]) -> DraftmarkError:
    return kind.__new__(kind, *args)


class GeometryError(DraftmarkError, ValueError):
    """A geometry field is out of range; `field` contains its name, e.g. ``"attention.page_size"``."""

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        self.field = field
        self.value = value
        super().__init__(f"{field} is {value!r}, but {limit}; {remedy}")


class BackendError(DraftmarkError):
    """Base class of errors about one backend."""


class LoadFailure(StrEnum):
    """Reasons why a backend cannot be loaded."""

    ENTRY_POINT_MISSING = "entry point missing"
    DUPLICATE_NAME = "two distributions with one name"
    WRONG_CONTRACT_MAJOR = "wrong contract major"
    IMPORT_ERROR = "import error"
    MISSING_HOOK = "missing hook"
    UNKNOWN_HOOK = "unknown hook"
    WRONG_SIGNATURE = "wrong signature"
    WRONG_RETURN = "wrong return type"
    HOOK_RAISED = "hook raised"
    RUNTIME_ABSENT = "vendor runtime absent"
    DEVICE_ABSENT = "device absent"


class BackendLoadError(BackendError):
    """A backend cannot be used at all; `failure` is the kind of cause, `remedy` how to fix it."""

    def __init__(self, name: str, failure: LoadFailure, cause: str, remedy: str) -> None:
        self.name, self.failure, self.cause, self.remedy = name, failure, cause, remedy
        super().__init__(f"backend {name!r} cannot be loaded ({failure.value}): {cause}; {remedy}")


class BackendHookError(BackendError):
    """A hook of a loaded backend raised, or returned a wrong type.

    Attributes:
        name: name of the backend.
        hook: name of the hook without its prefix, e.g. ``"buffers"``.
        failure: `LoadFailure.HOOK_RAISED` or `LoadFailure.WRONG_RETURN`.
        cause, remedy: what happened, and how to fix it.
    """

    def __init__(self, name: str, hook: str, failure: LoadFailure, cause: str, remedy: str) -> None:
        self.name, self.hook, self.failure, self.cause, self.remedy = name, hook, failure, cause, remedy
        super().__init__(f"backend {name!r} failed: its hook {hook}() {cause}; {remedy}")


class BackendRefusal(BackendError):
    """A backend does not serve a geometry; `reasons` contains its sentences and is never empty."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        self.name = name
        self.reasons = tuple(reasons)
        super().__init__(f"backend {name!r} does not serve this geometry: " + "; ".join(self.reasons))


class BufferError(DraftmarkError):
    """A buffer specification is malformed, a buffer name is unknown, or an arena's device is not present."""


class GuardError(BufferError):
    """Bytes around a buffer changed; `names` lists the buffers with overwritten guard words."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"guard words around {', '.join(self.names)} were overwritten: a kernel wrote outside the buffer; "
            "compare the buffer's declared shape with what the batch needs (`draftmark size`)"
        )


class BatchError(DraftmarkError, ValueError):
    """The tensors of a forward batch contradict each other, or do not match the geometry."""


class LengthsError(DraftmarkError):
    """Host lengths are not known well enough for the call, or do not match the dispatched steps."""


class GraphError(DraftmarkError):
    """A graph was captured twice, or replayed before its capture."""


class CaptureError(GraphError):
    """A captured region contains an operation that a graph cannot contain (a host read, a pageable copy)."""


class ModelError(DraftmarkError):
    """A model that draftmark cannot run correctly, or weights that it cannot read."""


class RequestError(DraftmarkError, ValueError):
    """A prompt or a generation setting is out of range."""
