"""Layers with a window in a KV pool of their own: the same tokens under other slots.

SGLang gives such a pool fewer slots, and frees what has left the window. `req_to_token` names slots of the pool of all
other layers, and a mapping of SGLang's says where each lies in this one: 0, the null page, for what was freed. Both
allocators hand out whole pages, so that a page there is a page here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import Mode
from draftmark.runtime import ForwardBatch

from .prefixes import Prefixes


def windowed_layers(pool: Any) -> frozenset[int]:
    """The layers of a pool that have the second one; none where there is one pool."""
    mapping = getattr(pool, "layers_mapping", None) or {}
    return frozenset(layer for layer, (_, windowed) in mapping.items() if windowed)


class WindowPool:
    """What the layers of the second pool are given instead of a batch: the same with another page table.

    Args:
        pool: SGLang's, whose `full_to_swa_index_mapping` its allocator replaces when it is resized.
        prefixes: of the runner's static batches; they keep the second table beside the first.
    """

    def __init__(self, pool: Any, prefixes: Prefixes, page_size: int) -> None:
        self._pool, self._prefixes, self._page_size = pool, prefixes, page_size
        self._twins: dict[tuple[Mode, int], tuple[ForwardBatch, ForwardBatch]] = {}
        prefixes.keep_second(self._slots)

    def twin(self, batch: ForwardBatch) -> ForwardBatch:
        """The batch for these layers; made when a batch is planned, and the same until the next."""
        key = batch.mode, batch.step
        known = self._twins.get(key)
        if known is None or known[0] is not batch:
            table = self._pages(batch) if batch.mode is Mode.EXTEND else self._prefixes.second(batch)
            known = self._twins[key] = batch, replace(batch, page_table=table)
        return known[1]

    def _slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Where slots of the first pool lie in the second."""
        found: torch.Tensor = self._pool.full_to_swa_index_mapping.index_select(0, slots.reshape(-1))
        return found.view(slots.shape)

    def _pages(self, batch: ForwardBatch) -> torch.Tensor:
        slots = self._slots(batch.page_table * self._page_size)
        return torch.div(slots, self._page_size, rounding_mode="floor").to(torch.int32)
