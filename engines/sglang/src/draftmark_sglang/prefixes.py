"""Lengths and page tables of the batches that graphs replay: what is copied before, and what is worked out inside.

Every launch before a replay costs the host some µs a round, and a captured one none. So before a replay only what
SGLang owns is copied, with one operation each, and the rest is done behind, in the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmark.runtime import BatchBuffers, ForwardBatch

from .page_table import page_starts


class Prefixes:
    """The lengths and page tables in one runner's static buffers.

    Args:
        buffers: the runner's. A table's columns that `req_to_token` does not reach stay 0, the null page: what a
            finished request still has in flight behind that wall must go nowhere (sglang#22778).
    """

    def __init__(self, buffers: BatchBuffers) -> None:
        self._page_size = buffers.geometry.attention.page_size
        # At a page size of 1 a slot is a page.
        self._slots = buffers.page_table if self._page_size == 1 else torch.zeros_like(buffers.page_table)
        self._read: tuple[torch.Tensor, torch.Tensor] | None = None
        self._translate: Callable[[torch.Tensor], torch.Tensor] | None = None

    def keep_second(self, translate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Keep a second page table, of a pool in which the same tokens lie in the slots that `translate` says."""
        self._translate = translate
        self._second = torch.zeros_like(self._slots)
        self._second_slots = self._second if self._page_size == 1 else torch.zeros_like(self._slots)

    def second(self, batch: ForwardBatch) -> torch.Tensor:
        """The second page table of a batch."""
        return self._second[: batch.padded_reqs]

    def copy(self, batch: ForwardBatch, forward: Any, counted: int, req_to_token: torch.Tensor) -> None:
        """Take SGLang's lengths and the slots that pages begin with: eagerly, before a capture and each replay.

        Args:
            counted: rows of this forward that SGLang's lengths count already.
        """
        requests = batch.padded_reqs
        torch.sub(forward.seq_lens[:requests], counted, out=batch.prefix_lens)
        starts = self._starts(req_to_token)
        into = self._slots[:requests]
        if starts.shape[1] < into.shape[1]:
            into = into[:, : starts.shape[1]]
        torch.index_select(starts, 0, forward.req_pool_indices[:requests], out=into)
        if self._translate is not None:
            self._second_slots[:requests, : into.shape[1]].copy_(self._translate(into))

    def write(self, batch: ForwardBatch, counted: int) -> None:
        """Turn what was copied into lengths and pages: in the graph. A second time changes nothing."""
        if counted > 1:
            batch.prefix_lens.clamp_(min=0)  # of a padded request one row is counted, and all its rows are subtracted
        if self._page_size > 1:
            slots = self._slots[: batch.padded_reqs]
            torch.div(slots, self._page_size, rounding_mode="floor", out=batch.page_table)
            if self._translate is not None:
                slots = self._second_slots[: batch.padded_reqs]
                torch.div(slots, self._page_size, rounding_mode="floor", out=self.second(batch))

    def _starts(self, req_to_token: torch.Tensor) -> torch.Tensor:
        """SGLang allocates `req_to_token` once, so its view is made once."""
        if self._read is None or self._read[0] is not req_to_token:
            self._slots.zero_()  # of a table that was wider
            if self._translate is not None:
                self._second_slots.zero_()
            self._read = req_to_token, page_starts(req_to_token, self._page_size, self._slots.shape[1])
        return self._read[1]
