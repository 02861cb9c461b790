"""Keys of captured graphs, and the interface of every device's graph state. Does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from ..errors import BatchError

Outputs = TypeVar("Outputs")
"""Any nesting of tensors, dataclasses, tuples, lists, dicts and None."""


class Program(StrEnum):
    """Computation that a graph contains. The DRAFT graph contains all ``num_steps - 1`` draft forwards."""

    DECODE = "decode"
    VERIFY = "verify"
    DRAFT_EXTEND = "draft_extend"
    DRAFT = "draft"
    RAGGED_VERIFY = "ragged_verify"
    DRAFT_BLOCK = "draft_block"


class GraphKey(NamedTuple):
    """Key of one graph: a program at one padded batch size. Sorts by program name, then size."""

    program: Program
    batch_size: int
    """Padded number of requests, one of ``Limits.capture_batch_sizes``. For RAGGED_VERIFY the number of query rows, one
    of ``Limits.row_budgets``."""

    def __str__(self) -> str:
        return f"{self.program.name}[{self.batch_size}]"


@runtime_checkable
class GraphState(Protocol):
    """Graphs of one device, each captured once and replayed by its key.

    A *step* is a callable without arguments that reads and writes static tensors only. Static tensors exist before
    capture, keep their addresses, and are filled in place before each replay. The caller owns them and keeps them
    alive. The state owns all memory that the step allocates, including the outputs.
    """

    def capture(self, key: GraphKey, step: Callable[[], Outputs]) -> Outputs:
        """Capture `step` under `key` and return its outputs.

        The contents of the outputs are undefined until the first replay; then each replay overwrites them in place.

        Raises:
            GraphError: `key` is already captured.
            CaptureError: the step contains an operation that a graph cannot contain, such as a host read.
        """
        ...

    def replay(self, key: GraphKey) -> Any:
        """Run the graph of `key` on the current contents of its static tensors; return the object of `capture`.

        The outputs are valid until the next replay of any key of this state, because graphs of a state may share
        memory. On a device this only enqueues work.

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
        """Bytes that all captures keep allocated: intermediates and outputs, without the caller's static tensors."""
        ...


def padded_batch_size(num_reqs: int, capture_batch_sizes: Iterable[int]) -> int | None:
    """Return the smallest captured size for `num_reqs` requests; None if none is large enough, then run eagerly.

    Raises:
        BatchError: `num_reqs` is not an integer >= 0.
    """
    if type(num_reqs) is not int or num_reqs < 0:
        raise BatchError(f"num_reqs is {num_reqs!r}, but it must be an integer >= 0; count the live requests")
    return min((size for size in capture_batch_sizes if size >= num_reqs), default=None)
