"""Committed lengths and page tables of the batches that CUDA graphs replay.

A launch before a replay costs the host some µs per round; a captured launch costs nothing. So `copy` copies only
SGLang's own tensors before a replay, with one operation each, and `write` computes the rest inside the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmark.runtime import BatchBuffers, ForwardBatch

from .page_table import page_starts


class Prefixes:
    """Fills committed lengths and page tables in the static buffers of one runner.

    Columns of a page table past the width of `req_to_token` stay 0, the null page. A finished request may still store
    tokens past its row's end, and those must go to the null page (sglang#22778).

    Args:
        buffers: static batch buffers of the runner.
    """

    def __init__(self, buffers: BatchBuffers) -> None:
        self._page_size = buffers.geometry.attention.page_size
        # With page size 1 slots equal pages, so the page table itself receives the slots.
        self._slots = buffers.page_table if self._page_size == 1 else torch.zeros_like(buffers.page_table)
        self._cached_starts: tuple[torch.Tensor, torch.Tensor] | None = None
        self._translate: Callable[[torch.Tensor], torch.Tensor] | None = None

    def add_window_table(self, translate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Allocate the page table of the window layers' KV pool.

        Args:
            translate: maps slots of the full KV pool to slots of the window layers' pool.
        """
        self._translate = translate
        self._window_table = torch.zeros_like(self._slots)
        self._window_slots = self._window_table if self._page_size == 1 else torch.zeros_like(self._slots)

    def window_table(self, batch: ForwardBatch) -> torch.Tensor:
        """Return a batch's page table for the window layers' KV pool, int32 ``[R, pages]``."""
        return self._window_table[: batch.padded_reqs]

    def copy(self, batch: ForwardBatch, forward: Any, counted: int, req_to_token: torch.Tensor) -> None:
        """Copy SGLang's lengths and each page's first slot, outside the graph before a capture and each replay.

        Args:
            counted: number of this forward's rows that SGLang's lengths already include.
        """
        requests = batch.padded_reqs
        torch.sub(forward.seq_lens[:requests], counted, out=batch.prefix_lens)
        starts = self._page_starts(req_to_token)
        into = self._slots[:requests]
        if starts.shape[1] < into.shape[1]:
            into = into[:, : starts.shape[1]]
        torch.index_select(starts, 0, forward.req_pool_indices[:requests], out=into)
        if self._translate is not None:
            self._window_slots[:requests, : into.shape[1]].copy_(self._translate(into))

    def write(self, batch: ForwardBatch, counted: int) -> None:
        """Compute lengths and page tables from the data that `copy` wrote, inside the graph.

        A second call changes nothing.
        """
        if counted > 1:
            batch.prefix_lens.clamp_(min=0)  # A padding request has 1 - counted, which is negative.
        if self._page_size > 1:
            slots = self._slots[: batch.padded_reqs]
            torch.div(slots, self._page_size, rounding_mode="floor", out=batch.page_table)
            if self._translate is not None:
                slots = self._window_slots[: batch.padded_reqs]
                torch.div(slots, self._page_size, rounding_mode="floor", out=self.window_table(batch))

    def _page_starts(self, req_to_token: torch.Tensor) -> torch.Tensor:
        """Return the view of `req_to_token` with each page's first slot.

        The view is cached, because SGLang allocates `req_to_token` once.
        """
        if self._cached_starts is None or self._cached_starts[0] is not req_to_token:
            self._slots.zero_()  # A wider earlier table has filled columns that this table does not overwrite.
            if self._translate is not None:
                self._window_slots.zero_()
            self._cached_starts = req_to_token, page_starts(req_to_token, self._page_size, self._slots.shape[1])
        return self._cached_starts[1]
