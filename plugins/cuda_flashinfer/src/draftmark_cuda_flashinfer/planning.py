"""What FlashInfer's planner is asked for one batch. On the host; no device is touched.

The backend hands these requests to `Vendor.plan`, and `library` the same ones to `Vendor.workspace_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from draftmark import Geometry, Mode

from . import levels, partition, sizing
from .partition import Partition
from .vendor import Request

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch


class Planner:
    """Requests of a geometry's batches.

    Args:
        host_indptrs: int32 ``[2, max_reqs + 1]`` on the host: row offsets and page offsets of the paged level. Written
            by each call, and read by FlashInfer until its plan is made.
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

    def requests(self, batch: ForwardBatch) -> tuple[Request, Request | None]:
        """Of the paged level, and of the masked level where `batch` takes two passes; valid until the next call.

        Reads the batch's host numbers alone.
        """
        if batch.uniform is None:
            return self._ragged(batch), None
        return self._uniform(batch, batch.uniform.q_len)

    def _ragged(self, batch: ForwardBatch) -> Request:
        geometry, count = self._geometry, batch.padded_reqs
        pages = sizing.host_pages(geometry, batch)
        cut = partition.extend(geometry, batch.q_lens, pages, self._float_room, self._int_room)
        a, (rows, ids) = geometry.attention, self._indptrs(count)
        rows.copy_(_offsets(batch.q_lens))
        ids.copy_(_offsets(pages))
        return Request(rows, ids, batch.num_rows, a.page_size, True, a.window_left, cut)

    def _uniform(self, batch: ForwardBatch, q_len: int) -> tuple[Request, Request | None]:
        a, count = self._geometry.attention, batch.padded_reqs
        cut, masked = self._partition(batch.mode, count, q_len)
        rows, ones = self._uniform_rows[q_len][: count + 1], self._ones[: count + 1]
        ids = ones  # a chunk holds any request, so no length matters
        if cut.graph:
            ids = self._indptrs(count)[1]
            ids.copy_(_offsets(sizing.host_pages(self._geometry, batch)))
        if masked is None:
            return Request(rows, ids, batch.num_rows, a.page_size, True, a.window_left, cut, q_len), None
        paged = Request(rows, ids, batch.num_rows, a.page_size, False, -1, cut, q_len)
        # One token a request stands for any number: a chunk holds them all.
        return paged, Request(rows, ones, batch.num_rows, 1, False, -1, masked)

    def _indptrs(self, count: int) -> torch.Tensor:
        """int32 ``[2, count + 1]``: row offsets and page offsets of so many requests, one behind the other."""
        return self._host_indptrs[: 2 * (count + 1)].view(2, count + 1)

    def _partition(self, mode: Mode, count: int, q_len: int) -> tuple[Partition, Partition | None]:
        """Of a uniform batch: it depends on counts alone, and is worked out once."""
        key = (mode, count)
        if key not in self._partitions:
            geometry, masked = self._geometry, None
            if levels.is_masked(geometry, mode):
                # A chunk that holds the longest tail makes one plan serve every step of a draft program.
                extent = geometry.extent(mode, geometry.last_step(mode))
                masked = partition.masked(geometry, q_len, count, levels.masked_len(geometry, extent.tail_len))
            self._partitions[key] = partition.uniform(geometry, q_len, count), masked
        return self._partitions[key]


def _offsets(counts: Sequence[int]) -> torch.Tensor:
    """int32 ``[n + 1]`` on the host: where each of n begins."""
    return torch.tensor(list(accumulate(counts, initial=0)), dtype=torch.int32)
