"""Arguments of FlashInfer's planner for one batch, computed on the host without a device.

The backend passes them to `Vendor.plan`, and device tests pass them to `Vendor.workspace_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from draftmark import BatchError, Geometry, Mode
from draftmark.runtime import Exact

from . import levels, partition, sizing
from .partition import Partition
from .vendor import Request

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


class Planner:
    """Makes the arguments of FlashInfer's planner (`vendor.Request`) for the batches of one geometry.

    Args:
        geometry: the geometry.
        host_indptrs: int32 ``[2, max_reqs + 1]`` on the host: row offsets, and page offsets of the pass over pages.
            Each call overwrites it, and FlashInfer reads it during `plan`.
    """

    def __init__(self, geometry: Geometry, host_indptrs: torch.Tensor) -> None:
        self._geometry = geometry
        self._host_indptrs = host_indptrs.view(-1)
        self._int_room, _ = sizing.plan_bytes(geometry)
        self._float_room = sizing.float_workspace(geometry)
        self._ones = torch.arange(geometry.max_reqs + 1, dtype=torch.int32)
        uniform = [mode for mode in geometry.modes if mode is not Mode.EXTEND]
        self._uniform_rows = {q: self._ones * q for q in {geometry.extent(mode).q_len for mode in uniform}}
        self._partitions: dict[tuple[Mode, int], tuple[Partition, Partition | None]] = {}

    def requests(self, batch: ForwardBatch, *, causal: bool = True) -> tuple[Request, Request | None]:
        """Return the planner's arguments for the pass over pages, and for the masked pass (None if there is none).

        They are valid until the next call. Only host numbers of `batch` are read.

        Args:
            causal: False for a `Block` tail. FlashInfer's workspace sizes do not depend on it.
        """
        if not batch.uniform:
            return self._ragged(batch), None
        return self._uniform(batch, batch.q_lens[0], causal)

    def _ragged(self, batch: ForwardBatch) -> Request:
        geometry, count = self._geometry, batch.padded_reqs
        pages = sizing.host_pages(geometry, batch)
        cut = partition.extend(geometry, batch.q_lens, pages, self._float_room, self._int_room)
        a, (rows, ids) = geometry.attention, self._indptrs(count)
        rows.copy_(_offsets(batch.q_lens))
        ids.copy_(_offsets(pages))
        return Request(rows, ids, batch.num_rows, a.page_size, True, a.window_left, cut)

    def _uniform(self, batch: ForwardBatch, q_len: int, causal: bool) -> tuple[Request, Request | None]:
        a, count = self._geometry.attention, batch.padded_reqs
        cut, masked = self._partition(batch.mode, count, q_len)
        rows, ones = self._uniform_rows[q_len][: count + 1], self._ones[: count + 1]
        ids = ones  # One page per request: without split-KV the plan does not depend on page counts.
        if cut.graph:
            ids = self._indptrs(count)[1]
            ids.copy_(_offsets(sizing.host_pages(self._geometry, batch)))
        if masked is None:
            return Request(rows, ids, batch.num_rows, a.page_size, causal, a.window_left, cut, q_len), None
        paged = Request(rows, ids, batch.num_rows, a.page_size, False, -1, cut, q_len)
        # The masked pass is planned with one token per request, because its plan does not split keys and so does not
        # depend on their number.
        return paged, Request(rows, ones, batch.num_rows, 1, False, -1, masked)

    def _indptrs(self, count: int) -> torch.Tensor:
        """Return buffers for row offsets and page offsets of `count` requests, int32 ``[2, count + 1]``, contiguous."""
        return self._host_indptrs[: 2 * (count + 1)].view(2, count + 1)

    def _partition(self, mode: Mode, count: int, q_len: int) -> tuple[Partition, Partition | None]:
        """Return the cached partitions of a uniform batch: of the pass over pages, and of the masked pass or None."""
        key = (mode, count)
        if key not in self._partitions:
            geometry, masked = self._geometry, None
            if levels.is_masked(geometry, mode):
                # The last step has the most draft tokens. A chunk that covers them makes one plan valid for all steps.
                extent = geometry.extent(mode, geometry.last_step(mode))
                masked = partition.masked(geometry, q_len, count, levels.masked_len(geometry, extent.tail_len))
            self._partitions[key] = partition.uniform(geometry, q_len, count), masked
        return self._partitions[key]


def _offsets(counts: Sequence[int]) -> torch.Tensor:
    """Return the prefix sums of `counts` from 0, int32 ``[n + 1]`` on the host."""
    return torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)


def check_batch(batch: ForwardBatch, geometry: Geometry) -> None:
    """Raise `BatchError` if the host's lengths are not exact, or if the batch has more requests than the geometry."""
    if not isinstance(batch.host, Exact):
        raise BatchError(
            f"host is {type(batch.host).__name__}, but FlashInfer's plan needs Exact lengths: with a bound its "
            "split-KV ranges differ from the device's lengths; settle the lengths first, with overlap=False"
        )
    if batch.padded_reqs > geometry.max_reqs:
        raise BatchError(
            f"the batch has {batch.padded_reqs} requests, but max_reqs is {geometry.max_reqs}; raise max_num_reqs"
        )
