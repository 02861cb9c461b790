"""Every error draftmark raises on purpose.

    DraftmarkError
    ├── GeometryError          a shape, limit or draft setting that cannot be served
    ├── BackendError
    │   ├── BackendLoadError   a backend cannot be found, imported, or trusted to be one
    │   ├── BackendHookError   a hook of a loaded backend raised, or returned the wrong thing
    │   └── BackendRefusal     a loaded backend says no to a geometry, with its reasons
    ├── BufferError            a buffer specification, or an arena asked for the wrong thing
    │   └── GuardError         a guard word was overwritten
    ├── BatchError             a forward batch whose tensors do not describe one
    ├── RanksDisagree          tensor-parallel ranks would run different steps
    ├── LengthsError           host lengths asked for what they cannot know
    ├── GraphError             capture or replay out of order
    │   └── CaptureError       an operation that a captured region must not contain
    ├── CacheExhausted         the page pool cannot serve a reservation (nothing was taken)
    ├── ModelError             a model or weights file that would be run wrongly
    └── RequestError           a prompt or a generation setting out of range

Each message is one sentence that names the thing, the value, the limit and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any


class DraftmarkError(Exception):
    """Root of every deliberate error; catch it to catch them all. It can be pickled: workers send theirs home."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own calls the class with the message alone, which an error of several arguments does not take;
        # a pool whose worker sends such an error breaks, and says nothing of why.
        return _made_again, (type(self), self.args), self.__dict__


def _made_again(kind: type[DraftmarkError], args: tuple[Any, ...]) -> DraftmarkError:
    return kind.__new__(kind, *args)


class GeometryError(DraftmarkError, ValueError):
    """A geometry field is out of range. `field` names it, e.g. ``"attention.page_size"``."""

    def __init__(self, field: str, value: object, limit: str, remedy: str) -> None:
        self.field = field
        self.value = value
        super().__init__(f"{field} is {value!r}, but {limit}; {remedy}")


class BackendError(DraftmarkError):
    """Something about one backend."""


class LoadFailure(StrEnum):
    """Why a backend could not be loaded."""

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
    """A backend that cannot be used at all; `failure` is the kind of cause, `remedy` the way out."""

    def __init__(self, name: str, failure: LoadFailure, cause: str, remedy: str) -> None:
        self.name = name
        self.failure = failure
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"backend {name!r} cannot be loaded ({failure.value}): {cause}; {remedy}")


class BackendHookError(BackendError):
    """A hook of a loaded backend failed in service.

    Attributes:
        name: the backend.
        hook: the hook's name without its prefix, e.g. ``"buffers"``.
        failure: `LoadFailure.HOOK_RAISED` or `LoadFailure.WRONG_RETURN`.
        cause, remedy: what happened, and the way out.
    """

    def __init__(self, name: str, hook: str, failure: LoadFailure, cause: str, remedy: str) -> None:
        self.name = name
        self.hook = hook
        self.failure = failure
        self.cause = cause
        self.remedy = remedy
        super().__init__(f"backend {name!r} failed in service: its hook {hook}() {cause}; {remedy}")


class BackendRefusal(BackendError):
    """A backend does not serve a geometry. `reasons` are its own sentences, never empty."""

    def __init__(self, name: str, reasons: Sequence[str]) -> None:
        self.name = name
        self.reasons = tuple(reasons)
        super().__init__(f"backend {name!r} does not serve this geometry: " + "; ".join(self.reasons))


class BufferError(DraftmarkError):
    """A buffer specification is malformed, or a name is not in the arena."""


class GuardError(BufferError):
    """Bytes around a buffer changed. `names` lists the buffers whose guard words were hit."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        super().__init__(
            f"guard words around {', '.join(self.names)} were overwritten: a kernel wrote outside the buffer; "
            "compare the buffer's declared shape with what the batch needs (`draftmark size`)"
        )


class BatchError(DraftmarkError, ValueError):
    """A forward batch whose tensors contradict each other."""


class RanksDisagree(DraftmarkError):
    """Ranks of one group hold different metadata for one step. `part` names what, `ranks` who differs from rank 0."""

    def __init__(self, part: str, ranks: Sequence[int], step: int) -> None:
        self.part, self.ranks = part, tuple(ranks)
        super().__init__(
            f"ranks {', '.join(map(str, ranks))} disagree with rank 0 about the {part} of step {step}; decide it on "
            "one rank and send it to the others before the step"
        )


class LengthsError(DraftmarkError):
    """Host lengths were asked for more than they know."""


class GraphError(DraftmarkError):
    """A graph was captured twice, or replayed without having been captured."""


class CaptureError(GraphError):
    """The captured region contains what no graph may contain (a host read, a pageable copy, …)."""


class CacheExhausted(DraftmarkError):
    """The page pool has fewer free pages than one reservation needs. Nothing was taken."""

    def __init__(self, needed: int, free: int, total: int) -> None:
        self.needed = needed
        self.free = free
        self.total = total
        super().__init__(
            f"{needed} KV pages are needed but {free} of {total} are free; "
            "finish or cancel a request, lower max_num_reqs, or give the cache more pages"
        )


class ModelError(DraftmarkError):
    """A model that would be run wrongly, or weights that cannot be read."""


class RequestError(DraftmarkError, ValueError):
    """A prompt or a generation setting that cannot be served."""
