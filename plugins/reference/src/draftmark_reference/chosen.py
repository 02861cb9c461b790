"""Attention of rows with chosen keys, in plain torch: each row attends to the keys of its own list."""

from __future__ import annotations

import torch

from draftmark import FP8_DS_MLA, AttentionShape, Form, Geometry
from draftmark.runtime import Chosen, ForwardBatch, KVCache

from .attention import Keys, attend_block
from .row_format import bytes_at, numbers

MOST_ELEMENTS = 2**22
"""Elements of gathered keys that one product reads; rows after these follow in the next product."""


def attend_chosen(
    geometry: Geometry,
    q: torch.Tensor,
    cache: KVCache,
    batch: ForwardBatch,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Compute `out`, and `lse` unless it is None. Each row is a request of its own, with the keys of its list.

    Padding rows at the end of a budget are rows without keys: their lists are undefined.
    """
    a, chosen = geometry.attention, batch.chosen
    assert chosen is not None, "validate requires the lists"
    row = torch.arange(batch.num_rows, dtype=torch.int32, device=q.device)
    counts = torch.where(row < batch.q_indptr[-1], chosen.counts, 0)
    elements = a.chosen_width * a.num_kv_heads * a.head_dim
    # A matrix product's rounding depends on its size, so batch invariance needs one row in each.
    size = 1 if geometry.limits.batch_invariant else max(1, MOST_ELEMENTS // elements)
    for first in range(0, batch.num_rows, size):
        here = slice(first, min(first + size, batch.num_rows))
        listed = _listed(chosen, counts, here)
        keys = _gather(geometry, cache, torch.where(listed, chosen.slots[here], 0).long(), listed)
        empty = ~listed.any(1)[:, None]
        # The values of an empty row are 0, so that a softmax over its first key gives the output 0.
        seen = listed.clone()
        seen[:, :1] |= empty
        sums = None if lse is None else lse[here, None]
        attend_block(q[here, None], keys, seen[:, None], a, out[here, None], sinks, sums)
        if lse is not None:
            lse[here].masked_fill_(empty, float("-inf"))


def _listed(chosen: Chosen, counts: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return the entries that name a key, bool ``[rows, chosen_width]``: those before the count, except -1."""
    slots = chosen.slots[rows]
    entry = torch.arange(slots.shape[1], dtype=torch.int32, device=slots.device)
    return (entry < counts[rows, None]) & (slots >= 0)


def _gather(geometry: Geometry, cache: KVCache, slots: torch.Tensor, listed: torch.Tensor) -> Keys:
    """Return the KV of slots ``[rows, chosen_width]``, with 0 where `listed` is False."""
    a: AttentionShape = geometry.attention
    at = slots // a.page_size, slots % a.page_size
    if a.row_format == FP8_DS_MLA:
        k = numbers(bytes_at(cache.k, *at), a.value_width)
    elif Form.LATENT_PARTS in geometry.forms:
        k = torch.cat([part[at] for part in cache.parts], -1).unsqueeze(2)
    else:
        k = cache.k[at]
    k = torch.where(listed[..., None, None], k.float(), 0).permute(2, 0, 1, 3)
    if a.latent:
        return Keys(k, k[..., : a.value_width])
    return Keys(k, torch.where(listed[..., None, None], cache.v[at].float(), 0).permute(2, 0, 1, 3))
