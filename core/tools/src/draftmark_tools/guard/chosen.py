"""Checks of the lists of chosen keys: their entries, and the pool that they name. Reads the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from draftmark.batch import Block, ForwardBatch, Tree
from draftmark.errors import BatchError
from draftmark.geometry import Geometry, Mode

if TYPE_CHECKING:
    from draftmark.cache import KVCache


def num_slots(cache: KVCache, geometry: Geometry) -> int:
    """Return the number of a cache's slots."""
    pages = cache.parts[0] if geometry.attention.latent else cache.k
    return pages.shape[0] * geometry.attention.page_size


def check_pool(cache: KVCache, geometry: Geometry) -> None:
    """Raise `BatchError` unless an int32 slot names every token of the cache. No device read."""
    slots = num_slots(cache, geometry)
    if slots > 2**31:
        raise BatchError(
            f"the cache has {slots} slots, but chosen keys are int32 slots below 2**31; use a pool of fewer pages"
        )


def check_lists(batch: ForwardBatch, geometry: Geometry, limit: int) -> None:
    """Check the lists of a batch that `validate` accepts. The layer that attends next has a cache of `limit` slots.

    Raises:
        BatchError: the first row with a count, a slot or a repeated slot that contradicts `Chosen`.
    """
    assert batch.chosen is not None, "validate requires the lists"
    starts = batch.q_indptr.tolist()
    slots, counts = batch.chosen.slots[: starts[-1]].cpu().long(), batch.chosen.counts[: starts[-1]].tolist()
    width, lens = geometry.attention.chosen_width, batch.prefix_lens.tolist()
    for request in range(batch.padded_reqs):
        for row in range(starts[request], starts[request + 1]):
            if not 0 <= counts[row] <= width:
                raise BatchError(
                    f"chosen.counts[{row}] is {counts[row]}, but a list has 0 … {width} entries; write the number of "
                    "its slots, 0 for a padding row"
                )
            named = slots[row, : counts[row]]
            wrong = named[(named < -1) | (named >= limit)]
            if len(wrong):
                raise BatchError(
                    f"chosen.slots[{row}] has {int(wrong[0])}, but the cache has slots 0 … {limit - 1}; write -1 where "
                    "there is no key"
                )
            if request < batch.num_reqs:
                _check_row(batch, geometry, request, row, starts, lens[request], named[named >= 0])


def _check_row(
    batch: ForwardBatch, geometry: Geometry, request: int, row: int, starts: list[int], prefix: int, named: torch.Tensor
) -> None:
    """Require distinct slots that the row would see without a list."""
    ordered = named.sort().values
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if len(repeated):
        raise BatchError(
            f"chosen.slots[{row}] has slot {int(repeated[0])} more than once, but a list names a key once; "
            "write -1 in place of the second one"
        )
    size, rows = geometry.attention.page_size, starts[request + 1] - starts[request]
    tail = rows if batch.mode is Mode.RAGGED_VERIFY else batch.tail_lens[request]
    own = tail - rows + row - starts[request]
    seen = torch.cat((torch.arange(prefix), prefix + _visible_tail(batch, row, tail, own)))
    pages = batch.page_table[request].cpu().long()
    visible = pages[seen // size] * size + seen % size
    hidden = named[~torch.isin(named, visible)]
    if len(hidden):
        raise BatchError(
            f"chosen.slots[{row}] has slot {int(hidden[0])}, which row {row - starts[request]} of request {request} "
            f"does not see: its prefix has {prefix} tokens, and its tail {tail}; choose among its own keys"
        )


def _visible_tail(batch: ForwardBatch, row: int, tail: int, own: int) -> torch.Tensor:
    """Return the tail slots that a row sees by the batch's tail; `own` is the row's tail slot."""
    slots = torch.arange(tail)
    if isinstance(batch.tail, Block):
        return slots
    if isinstance(batch.tail, Tree):
        words = batch.tail.mask[row].cpu().long()
        return slots[(words[slots // 32] >> (slots % 32)) & 1 == 1]
    return slots[: own + 1]
