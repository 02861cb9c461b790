"""Fills rows (q, k, v) and the KV cache with each kind of test values; see `cases.contents`."""

from __future__ import annotations

import random

import torch

from ..cases.contents import (
    BELOW,
    CONTRAST,
    CONTRASTS,
    COUNTABLE,
    LEVELS,
    NEEDLE,
    Contents,
    Needles,
    level_query,
)
from ..cases.forwards import ForwardCase
from ..oracle.attention import real_values
from ..oracle.history import kv_slots
from ..oracle.latent import keys_and_values
from .expected import quantised, stored_pools
from .pools import raw
from .tensors import CaseTensors, used_slots


def fill(tensors: CaseTensors, forward: ForwardCase, contents: Contents, seed: int = 0) -> None:
    """Fill the rows of a forward, and the KV that is stored before it. Equal seeds give equal contents."""
    tensors.fill_rows(forward, seed, CONTRAST.get(contents, 1.0))
    tensors.fill_cache(forward, seed)
    if contents in COUNTABLE:
        _count(tensors, forward, seed)
    if contents is Contents.WEIGHED:
        q = tensors.rows(forward)[0]
        pair = torch.arange(q.shape[0])[:, None] + torch.arange(q.shape[1])
        q.mul_(torch.tensor(CONTRASTS)[pair % len(CONTRASTS)].to(q)[..., None])
    if contents is Contents.NEEDLES:
        _aim(tensors, forward, seed)
    if contents is Contents.LEVELS:
        _level(tensors, forward, seed)


def _count(tensors: CaseTensors, forward: ForwardCase, seed: int) -> None:
    """Give each value vector of the rows and of the cache a 1 in one random dimension, and zeros elsewhere."""
    dice, cache, v = torch.Generator().manual_seed(seed + 5), tensors.cache, tensors.value_rows(forward)
    pages = tensors.value_pages

    def values(shape: torch.Size) -> torch.Tensor:
        return torch.zeros(shape).scatter_(-1, torch.randint(0, shape[-1], (*shape[:-1], 1), generator=dice), 1.0)

    v.copy_(values(v.shape))
    slots, size = torch.tensor(used_slots(forward), dtype=torch.int64, device=pages.device), pages.shape[1]
    stored = values(torch.Size((len(slots), *pages.shape[2:]))).to(pages.device)
    raw(pages)[slots // size, slots % size] = raw(quantised(stored, cache.v_scale, pages.dtype))


def _aim(tensors: CaseTensors, forward: ForwardCase, seed: int) -> None:
    """Make the query of each live row and head point at one key that the row sees, which then gets most weight."""
    a, dice = forward.geometry.attention, random.Random(f"needles {seed} {forward.name}")
    slots = [kv_slots(one, a.page_size) for one in forward.requests]
    rows = forward.rows[: forward.live_rows]
    chosen = []
    for n, row in rows:
        needles = Needles(forward.requests[n], row, a.window_left)
        chosen += [slots[n][needles.draw(dice)] for _ in range(a.num_qo_heads)]
    keys = keys_and_values(stored_pools(forward, tensors), a)[0]
    where = torch.tensor(chosen, dtype=torch.int64, device=keys.device)
    found = real_values(keys, where, tensors.cache.k_scale).view(len(rows), a.num_qo_heads, a.num_kv_heads, -1)
    head = torch.arange(a.num_qo_heads, device=found.device)
    picked = found[:, head, head // (a.num_qo_heads // a.num_kv_heads)]
    tensors.q[: len(rows)].copy_(NEEDLE * picked / picked.norm(dim=-1, keepdim=True))


def _level(tensors: CaseTensors, forward: ForwardCase, seed: int) -> None:
    """Set each key to a sign vector times one of the sizes `LEVELS`. Queries are parallel or antiparallel to it."""
    dice, query = torch.Generator().manual_seed(seed + 3), level_query(forward.geometry.attention)
    low, high = LEVELS
    signs = torch.randint(0, 2, (tensors.q.shape[-1],), generator=dice) * 2.0 - 1

    def drawn(shape: torch.Size) -> torch.Tensor:
        return torch.randint(0, 2, (*shape[:-1], 1), generator=dice)

    q, k, _, _ = tensors.rows(forward)
    q.copy_(signs * query * ((1 + BELOW) * drawn(q.shape) - BELOW))
    k.copy_(signs * (low + (high - low) * drawn(k.shape)))
    used = torch.tensor(used_slots(forward), dtype=torch.int64, device=k.device)
    values = (signs * (low + (high - low) * drawn(torch.Size((len(used), *k.shape[1:]))))).to(k.device)
    pools = tensors.key_pages
    for pool, part in zip(pools, torch.split(values, [one.shape[-1] for one in pools], -1), strict=True):
        stored = raw(quantised(part, tensors.cache.k_scale, pool.dtype))
        raw(pool)[used // pool.shape[1], used % pool.shape[1]] = stored
