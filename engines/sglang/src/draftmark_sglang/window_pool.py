"""Page tables for sliding-window layers if SGLang stores their KV in a second pool with its own slots.

SGLang gives the second pool fewer slots and frees tokens that have left the window. `req_to_token` has slots of the
first pool. SGLang's `full_to_swa_index_mapping` gives a token's slot in the second pool, or 0 (the null page) if it was
freed. Both allocators allocate whole pages, so a page of the first pool is a page of the second.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import Mode
from draftmark.runtime import ForwardBatch

from .prefixes import Prefixes


def windowed_layers(pool: Any) -> frozenset[int]:
    """Return the ids of the layers with KV in SGLang's second pool (for windows); empty if there is one pool."""
    mapping = getattr(pool, "layers_mapping", None) or {}
    return frozenset(layer for layer, (_, windowed) in mapping.items() if windowed)


class WindowPool:
    """Replaces a batch's page table for the layers with KV in SGLang's second pool (for windows).

    Args:
        pool: SGLang's KV pool. Its allocator replaces `full_to_swa_index_mapping` when the pool is resized.
        prefixes: page tables of the runner's static batches, including the second pool's.
        page_size: tokens per page.
    """

    def __init__(self, pool: Any, prefixes: Prefixes, page_size: int) -> None:
        self._pool, self._prefixes, self._page_size = pool, prefixes, page_size
        self._converted: dict[tuple[Mode, int], tuple[ForwardBatch, ForwardBatch]] = {}
        prefixes.add_window_table(self._translate)

    def with_window_table(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with the second pool's page table. The result is cached until the batch changes."""
        key = batch.mode, batch.step
        known = self._converted.get(key)
        if known is None or known[0] is not batch:
            table = self._pages(batch) if batch.mode is Mode.EXTEND else self._prefixes.window_table(batch)
            known = self._converted[key] = batch, replace(batch, page_table=table)
        return known[1]

    def _translate(self, slots: torch.Tensor) -> torch.Tensor:
        """Map KV slots of SGLang's first pool to slots of the second pool (for windows)."""
        found: torch.Tensor = self._pool.full_to_swa_index_mapping.index_select(0, slots.reshape(-1))
        return found.view(slots.shape)

    def _pages(self, batch: ForwardBatch) -> torch.Tensor:
        slots = self._translate(batch.page_table * self._page_size)
        return torch.div(slots, self._page_size, rounding_mode="floor").to(torch.int32)
