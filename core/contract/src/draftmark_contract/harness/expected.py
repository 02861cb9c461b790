"""Computes the expected result of a forward by brute force: visible slots, KV pool after the step, and output."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..cases.forwards import ForwardCase
from ..oracle import attention
from ..oracle.latent import keys_and_values
from ..oracle.truth import Row, Truth
from .pools import at_slots, raw
from .tensors import CaseTensors


@dataclass
class Expected:
    """Expected result of one forward.

    Attributes:
        truth: visible and written slots of every request. A padded request may see other slots instead.
        pools: each tensor of `CaseTensors.stored` after the forward stored its rows, ``[slots, kv_heads, width]``.
        answer: output of the live rows; padded rows are zero.
    """

    truth: Truth
    pools: list[torch.Tensor]
    answer: attention.Answer


def expected_of(forward: ForwardCase, tensors: CaseTensors, after: Expected | None = None) -> Expected:
    """Return the expected result of a forward that is loaded into the tensors. Call it before the backend runs.

    Args:
        after: expected result of the previous forward, if this forward reads KV that the previous one stores.
    """
    truth, pools = truth_of(forward), stored_pools(forward, tensors, after)
    live = {row: truth.visible[row] for row in forward.rows[: forward.live_rows]}
    return Expected(truth, pools, answer_of(forward, tensors, pools, live))


def stored_pools(forward: ForwardCase, tensors: CaseTensors, after: Expected | None = None) -> list[torch.Tensor]:
    """Return the KV ``[slots, kv_heads, width]`` of each stored tensor as it must be after the live rows are stored."""
    writes = truth_of(forward).writes
    before = after.pools if after else tensors.stored.values()
    pools = [pool.reshape(-1, *pool.shape[-2:]).clone() for pool in before]
    store(pools, {row: writes[row] for row in forward.rows[: forward.live_rows]}, forward, tensors)
    return pools


def store(pools: list[torch.Tensor], writes: dict[Row, int], forward: ForwardCase, tensors: CaseTensors) -> None:
    """Store a forward's new KV at KV slots, quantised as in the cache. Rows missing from `writes` are not stored.

    Rows that the forward does not store (`ForwardCase.kept`) are left out.

    Args:
        pools: the stored tensors, each ``[slots, kv_heads, width]`` or ``[pages, P, kv_heads, width]``.
    """
    kept, rows_in_order, device = forward.kept, forward.rows, tensors.k.device
    numbers = [number for number, row in enumerate(rows_in_order) if row in writes and row not in kept]
    if not numbers:
        return
    slots = torch.tensor([writes[rows_in_order[number]] for number in numbers], dtype=torch.int64, device=device)
    for pool, rows, scale in zip(pools, tensors.stored_rows(forward), tensors.stored_scales, strict=True):
        where = (slots,) if pool.dim() == 3 else (slots // pool.shape[1], slots % pool.shape[1])
        raw(pool)[where] = raw(quantised(rows[numbers], scale, pool.dtype))


def quantised(rows: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Return rows as the cache stores them: divided by `scale`, then rounded to the KV dtype."""
    return rows.to(dtype) if scale is None else (rows.float() / scale).to(dtype)


def answer_of(
    forward: ForwardCase, tensors: CaseTensors, pools: list[torch.Tensor], visible: dict[Row, tuple[int, ...]]
) -> attention.Answer:
    """Return the oracle's float64 attention over the stored KV, with the KV scales applied."""
    q, cache, shape = tensors.rows(forward)[0], tensors.cache, forward.geometry.attention
    scales, (k, v) = (cache.k_scale, cache.v_scale), keys_and_values(pools, shape)
    return attention.attend(q, k, v, visible, forward.rows, shape, scales, cache.sinks)


def answer_from_cache(
    forward: ForwardCase, tensors: CaseTensors, visible: dict[Row, tuple[int, ...]]
) -> attention.Answer:
    """Return `answer_of` over the layer's cache as it is now. Only visible slots are read, from a pool of any size."""
    union = sorted(set().union(*visible.values()))
    index = {slot: at for at, slot in enumerate(union)}
    slots = torch.tensor(union, dtype=torch.int64)
    pools = [at_slots(pool, slots) for pool in tensors.stored.values()]
    seen = {row: tuple(index[slot] for slot in named) for row, named in visible.items()}
    return answer_of(forward, tensors, pools, seen)


def truth_of(forward: ForwardCase) -> Truth:
    """Return the oracle's slot sets for a forward. The result is cached and shared, so do not change it."""
    return forward.truth
