"""What a captured graph is called, and what every device's graph state can do. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

Outputs = TypeVar("Outputs")
"""Any nest of tensors, dataclasses, tuples, lists, dicts and None."""


class Program(StrEnum):
    """What one graph computes. DRAFT holds all ``num_steps - 1`` draft forwards."""

    DECODE = "decode"
    VERIFY = "verify"
    DRAFT_EXTEND = "draft_extend"
    DRAFT = "draft"
    RAGGED_VERIFY = "ragged_verify"
    DRAFT_BLOCK = "draft_block"


class GraphKey(NamedTuple):
    """One graph: a program at one padded batch size. Orders by program name, then size."""

    program: Program
    batch_size: int
    """Padded number of requests, one of ``Limits.capture_batch_sizes``; of RAGGED_VERIFY the query rows, one of
    ``Limits.row_budgets``."""

    def __str__(self) -> str:
        return f"{self.program.name}[{self.batch_size}]"


@runtime_checkable
class GraphState(Protocol):
    """The graphs of one device, captured once by key and replayed by key.

    A *step* is a callable without arguments that reads and writes static tensors only: tensors that exist before
    capture, keep their addresses, and are filled in place before each replay. The caller owns them and must keep them
    alive; the state owns what the step allocates and what it returns.
    """

    def capture(self, key: GraphKey, step: Callable[[], Outputs]) -> Outputs:
        """Capture `step` under `key` and keep what it returns.

        The outputs mean nothing until the first replay; then each replay overwrites them in place.

        Raises:
            GraphError: `key` was captured before.
            CaptureError: the step contains what no graph may contain, such as a host read.
        """
        ...

    def replay(self, key: GraphKey) -> Any:
        """Run the graph again on the present contents of its tensors; the very object that `capture` returned.

        The outputs are valid until the next replay of any key of this state: graphs of a state may share memory, and
        what one returns may lie where another one works. On a device this only enqueues work.

        Raises:
            GraphError: `key` was never captured.
        """
        ...

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Every captured key, in order."""
        ...

    @property
    def pool_bytes(self) -> int:
        """Bytes held by all captures: their intermediates and outputs, not the caller's static tensors."""
        ...


def padded_batch_size(num_reqs: int, capture_batch_sizes: Iterable[int]) -> int | None:
    """The smallest captured size that holds `num_reqs` requests, or None: then the batch must run eagerly."""
    return min((size for size in capture_batch_sizes if size >= num_reqs), default=None)
