"""Order of the calls of a checked backend: plan, write_metadata, then the layers of the same batch."""

from __future__ import annotations

from collections.abc import Hashable

from draftmark.batch import ForwardBatch
from draftmark.batch.checks import check_kind
from draftmark.errors import BatchError


class CallOrder:
    """Remembers the planned batches of one backend, and the batch that write_metadata got last."""

    def __init__(self) -> None:
        self._planned: set[Hashable] = set()
        self._current: Hashable = None
        self._written = False

    def plan(self, batch: ForwardBatch) -> None:
        """Record that a batch is planned."""
        # Planned batches add up until one is written, because several DRAFT steps are planned before the first runs.
        if self._written:
            self._planned.clear()
            self._written = False
        self._planned.add(forward_key(batch))

    def require_planned(self, batch: ForwardBatch) -> None:
        """Raise `BatchError` unless write_metadata may get `batch` now."""
        check_kind("batch", batch, ForwardBatch, "a ForwardBatch", "take it from BatchBuffers or ragged")
        if forward_key(batch) not in self._planned:
            raise BatchError(
                f"write_metadata got a {batch.mode} batch that plan did not get; call plan(batch) on the host before "
                "each forward and before each replay"
            )

    def write(self, batch: ForwardBatch) -> None:
        """Record that the metadata of a batch is written."""
        self._current, self._written = forward_key(batch), True

    def require_written(self, call: str, batch: ForwardBatch) -> None:
        """Raise `BatchError` unless a layer's call may get `batch` now.

        Args:
            call: name of the method, for the error.
        """
        check_kind("batch", batch, ForwardBatch, "a ForwardBatch", "take it from BatchBuffers or ragged")
        if forward_key(batch) != self._current:
            raise BatchError(
                f"{call} got a {batch.mode} batch that write_metadata did not get last; call write_metadata(batch) "
                "before the layers of each forward"
            )


def forward_key(batch: ForwardBatch) -> Hashable:
    """Return an identifier of a forward: its host numbers, and the addresses of its tensors."""
    numbers = (batch.mode, batch.step, batch.num_reqs, batch.q_lens, batch.tail_lens, batch.num_rows, batch.host)
    return (*numbers, type(batch.tail), batch.prefix_lens.data_ptr(), batch.page_table.data_ptr())
