"""Random batches of latent layers and narrow values in every mode, with outputs and log-sum-exps in float64.

The expected results share no code with the kernels: visibility is a boolean matrix, and attention its definition. KV
slots that no token has written, and pages of no request, hold NaN.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftmark import (
    FP8_DS_MLA,
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Form,
    Geometry,
    Limits,
    Mode,
)
from draftmark.batch import Block, Causal, ForwardBatch, Tree
from draftmark.devices import device_profile
from draftmark.lengths import Unknown
from draftmark.runtime import KVCache
from draftmark_contract.oracle.row_format import drawn_rows, real_rows

TREE_MODES = (Mode.VERIFY, Mode.RAGGED_VERIFY)
"""Modes in which half of the batches have a tree; DRAFT always has one."""


@dataclass(frozen=True)
class Sizes:
    """Bounds of a random batch: live requests, keys of a prefix, and rows of a request."""

    requests: int = 4
    keys: int = 150
    rows: int = 9


@dataclass
class Request:
    """One live or padded request of a batch.

    Attributes:
        prefix: committed tokens.
        seen: bool ``[tail slots, tail slots]``: the tail slots that each tail slot sees.
        depth: depth of each tail slot.
        rows: query rows, the last tail slots.
        pages: page ids in order.
    """

    prefix: int
    seen: torch.Tensor
    depth: list[int]
    rows: int
    pages: list[int]

    @property
    def tail(self) -> int:
        """Tail slots of the request."""
        return len(self.depth)

    def slots(self, page_size: int) -> torch.Tensor:
        """Return the KV slots of all keys, in order."""
        at = torch.arange(self.prefix + self.tail)
        return torch.tensor(self.pages, dtype=torch.int64)[at // page_size] * page_size + at % page_size

    def visible(self, window_left: int) -> torch.Tensor:
        """Return bool ``[rows, keys]``: the keys that each row sees."""
        own = range(self.tail - self.rows, self.tail)
        seen = torch.cat((torch.ones(self.rows, self.prefix, dtype=torch.bool), self.seen[own.start :]), 1)
        if window_left >= 0:
            at = torch.tensor([*range(self.prefix), *(self.prefix + one for one in self.depth)])
            seen &= at[self.prefix + own.start :, None] - at <= window_left
        return seen


@dataclass
class Problem:
    """Holds one forward of a geometry. `k` and `v` are the new rows; v is None for a latent layer."""

    geometry: Geometry
    requests: list[Request]
    batch: ForwardBatch
    cache: KVCache
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor | None

    def new_out(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse full of NaN."""
        a = self.geometry.attention
        shape = self.batch.num_rows, a.num_qo_heads
        out = torch.full((*shape, a.value_width), float("nan"), dtype=self.q.dtype, device=self.q.device)
        return out, torch.full(shape, float("nan"), device=self.q.device)

    def stored(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of all KV slots, ``[slots, KV heads, elements]`` in float64 on a device, scaled."""
        a, cache = self.geometry.attention, self.cache
        if a.row_format == FP8_DS_MLA:
            k = real_rows(cache.k.to(device))
            v = k[..., : a.value_width]
        elif a.latent:
            k = torch.cat([one.to(device).double() for one in cache.parts], -1)[:, :, None]
            v = k[..., : a.value_width]
        else:
            k, v = cache.k.to(device).double(), cache.v.to(device).double()
        scales = [1.0 if one is None else one.item() for one in (cache.k_scale, cache.v_scale)]
        return k.flatten(0, 1) * scales[0], v.flatten(0, 1) * scales[1]

    def expected(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of the live rows in float64 on a device, from the rows that the cache holds."""
        a = self.geometry.attention
        k, v = self.stored(device)
        sinks = None if self.cache.sinks is None else self.cache.sinks.to(device).double()
        scale = a.head_dim**-0.5 if a.softmax_scale is None else a.softmax_scale
        outs, lses, first = [], [], 0
        for one in self.requests:
            q = self.q[first : first + one.rows].to(device).double()
            q = q.view(one.rows, a.num_kv_heads, a.group_size, a.head_dim)
            first += one.rows
            slots = one.slots(a.page_size).to(device)
            keys, values = (x[slots].transpose(0, 1) for x in (k, v))  # [KV heads, keys, elements]
            scores = torch.einsum("rhgd,hkd->hgrk", q, keys) * scale
            if a.logits_soft_cap:
                scores = a.logits_soft_cap * torch.tanh(scores / a.logits_soft_cap)
            scores = scores.masked_fill(~one.visible(a.window_left).to(device), float("-inf"))
            total = lse = scores.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(lse, sinks.view(a.num_kv_heads, -1, 1).expand_as(lse))
            outs.append(torch.einsum("hgrk,hkd->rhgd", (scores - total[..., None]).exp(), values).flatten(1, 2))
            lses.append(lse.permute(2, 0, 1).flatten(1, 2))
        return torch.cat(outs), torch.cat(lses)

    def expected_slots(self) -> list[int]:
        """Return the KV slot of each live row."""
        page = self.geometry.attention.page_size
        return [slot for one in self.requests for slot in one.slots(page)[one.prefix + one.tail - one.rows :].tolist()]


def draw(
    shape: AttentionShape,
    mode: Mode,
    seed: int,
    device: str = "cpu",
    sizes: Sizes = Sizes(),
    forms: tuple[Form, ...] = (),
    **limits: Any,
) -> Problem:
    """Draw a batch of a mode. With `Form.ENGINE_STORES` the cache already holds the new rows.

    Args:
        device: "cpu" or "cuda".
        limits: further fields of `Limits`.
    """
    chance, dice = random.Random(seed), torch.Generator().manual_seed(seed)
    live, rows = chance.randint(1, sizes.requests), chance.randint(1, sizes.rows)
    draft, step = _draft_of(mode, rows, chance)
    is_tree = mode is Mode.DRAFT or (mode in TREE_MODES and chance.random() < 0.6)
    requests = [_request(mode, draft, step, rows, is_tree, sizes, chance) for _ in range(live)]
    if not any(one.rows for one in requests):
        requests[0] = _made(requests[0].prefix, 1, 1, mode, False, chance)
    if mode is not Mode.EXTEND:
        requests += [_padding(requests[0], mode) for _ in range(chance.choice((0, 0, 1, 3)))]
    _hand_out(requests, shape.page_size, chance)
    live_rows = sum(one.rows for one in requests)
    num_rows = max(live_rows, 1) + (chance.randint(0, 3) if mode is Mode.RAGGED_VERIFY else 0)
    profile = device_profile("cuda") if device == "cuda" else DeviceProfile("cuda", 90, chance.choice((4, 16, 132)))
    longest = max(one.prefix + one.tail for one in requests)
    budgets = {"row_budgets": (num_rows,)} if mode is Mode.RAGGED_VERIFY else {}
    bounds = Limits(len(requests), longest, max(num_rows, 16), **budgets | limits)
    geometry = Geometry.create(shape, bounds, draft, profile, (mode,), forms)
    cache = _cache(geometry, requests, dice, device)
    q = torch.randn(num_rows, shape.num_qo_heads, shape.head_dim, generator=dice).to(getattr(torch, shape.q_dtype))
    k = torch.randn(num_rows, shape.num_kv_heads, shape.head_dim, generator=dice).to(q)
    v = None if shape.latent else torch.randn(num_rows, shape.num_kv_heads, shape.value_width, generator=dice).to(q)
    batch = _batch(geometry, mode, step, requests, live, num_rows, is_tree, rows, device)
    return Problem(geometry, requests, batch, cache, q.to(device), k.to(device), None if v is None else v.to(device))


def _draft_of(mode: Mode, rows: int, chance: random.Random) -> tuple[DraftShape, int]:
    if mode is Mode.DRAFT:
        steps = chance.randint(2, 4)
        return DraftShape(topk=rows, num_steps=steps, num_draft_tokens=rows * steps), chance.randint(0, steps - 2)
    return DraftShape(2, 2, rows, rows if mode is Mode.DRAFT_BLOCK else 0), 0


def _request(
    mode: Mode, draft: DraftShape, step: int, rows: int, is_tree: bool, sizes: Sizes, chance: random.Random
) -> Request:
    prefix = chance.choice((0, 1, chance.randint(0, sizes.keys), sizes.keys))
    if mode in (Mode.EXTEND, Mode.RAGGED_VERIFY):
        rows = chance.randint(0, rows)
    rows = 1 if mode is Mode.DECODE else rows
    return _made(prefix, rows * (step + 1) if mode is Mode.DRAFT else rows, rows, mode, is_tree, chance)


def _made(prefix: int, tail: int, rows: int, mode: Mode, is_tree: bool, chance: random.Random) -> Request:
    seen, depth = torch.eye(tail, dtype=torch.bool), [0] * tail
    for slot in range(1, tail):
        parent = chance.randrange(-1, slot) if is_tree else slot - 1
        if parent >= 0:
            seen[slot] |= seen[parent]
            depth[slot] = depth[parent] + 1
    if mode is Mode.DRAFT_BLOCK:
        seen[:] = True
    return Request(prefix, seen, depth, rows, [])


def _padding(other: Request, mode: Mode) -> Request:
    """Return a padded request: no prefix, and rows that see only themselves; no rows in a ragged batch."""
    tail, rows = (0, 0) if mode is Mode.RAGGED_VERIFY else (other.tail, other.rows)
    seen = torch.ones(tail, tail, dtype=torch.bool)
    if mode is not Mode.DRAFT_BLOCK:
        seen = seen.tril()
    return Request(0, seen, list(range(tail)), rows, [])


def _hand_out(requests: list[Request], page_size: int, chance: random.Random) -> None:
    """Give each request shuffled pages; page 0 is a null page."""
    counts = [-(-(one.prefix + one.tail) // page_size) for one in requests]
    free = list(range(1, 2 + sum(counts)))
    chance.shuffle(free)
    for one, count in zip(requests, counts, strict=True):
        one.pages = [free.pop() for _ in range(count)]


def _cache(geometry: Geometry, requests: list[Request], dice: torch.Generator, device: str) -> KVCache:
    a = geometry.attention
    pages = 2 + sum(len(one.pages) for one in requests)
    stores = Form.ENGINE_STORES in geometry.forms

    def filled(*rest: int) -> torch.Tensor:
        tensor = torch.full((pages * a.page_size, *rest), float("nan"))
        for one in requests:
            known = one.slots(a.page_size)
            known = known if stores else known[: len(known) - one.rows]
            tensor[known] = torch.randn(len(known), *rest, generator=dice)
        return tensor.view(pages, a.page_size, *rest).to(getattr(torch, a.kv_dtype)).to(device)

    if a.row_format == FP8_DS_MLA:
        rows = torch.full((pages * a.page_size, a.row_width), 255, dtype=torch.uint8)  # every part of a row is NaN
        for one in requests:
            known = one.slots(a.page_size)
            rows[known] = drawn_rows(len(known), dice).view(torch.uint8)
        stored = rows.view(pages, a.page_size, -1).view(torch.float8_e4m3fn).to(device)
        own_sinks = torch.randn(a.num_qo_heads, generator=dice).to(device) if a.sinks else None
        return KVCache.latent(stored, value_dim=a.value_width, sinks=own_sinks)
    scale = torch.tensor([0.5], device=device) if a.kv_dtype != a.q_dtype else None
    sinks = torch.randn(a.num_qo_heads, generator=dice).to(device) if a.sinks else None
    if not a.latent:
        return KVCache(filled(a.num_kv_heads, a.head_dim), filled(a.num_kv_heads, a.value_width), scale, scale, sinks)
    if Form.LATENT_PARTS in geometry.forms:
        parts = filled(a.value_width), filled(a.head_dim - a.value_width)
        return KVCache.latent(parts, scale, sinks=sinks)
    return KVCache.latent(filled(a.head_dim), scale, value_dim=a.value_width, sinks=sinks)


def _batch(
    geometry: Geometry,
    mode: Mode,
    step: int,
    requests: list[Request],
    live: int,
    num_rows: int,
    is_tree: bool,
    most_rows: int,
    device: str,
) -> ForwardBatch:
    table = torch.zeros(len(requests), int(geometry.max_pages_per_req), dtype=torch.int32)
    for r, one in enumerate(requests):
        table[r, : len(one.pages)] = torch.tensor(one.pages, dtype=torch.int32)
    q_lens, tail_lens = tuple(one.rows for one in requests), tuple(one.tail for one in requests)
    indptr = torch.tensor([0, *q_lens]).cumsum(0).int().to(device)
    tail = _tree(geometry, mode, requests, num_rows, device) if is_tree else Causal()
    if mode is Mode.RAGGED_VERIFY:
        q_lens = tail_lens = (most_rows,) * len(requests)
    lens = torch.tensor([one.prefix for one in requests], dtype=torch.int32)
    last, own = geometry.limits.max_context_len - 1, torch.zeros(num_rows, dtype=torch.int64)
    at = [min(one.prefix + level, last) for one in requests for level in one.depth[one.tail - one.rows :]]
    own[: len(at)] = torch.tensor(at, dtype=torch.int64)
    return ForwardBatch(
        mode, step, lens.to(device), indptr, table.to(device), Block() if mode is Mode.DRAFT_BLOCK else tail,
        own.to(device), Unknown(live, geometry.max_prefix_len), live, q_lens,
        tail_lens, num_rows, None,
    )  # fmt: skip


def _tree(geometry: Geometry, mode: Mode, requests: Sequence[Request], num_rows: int, device: str) -> Tree:
    """Return the packed masks and the depths of a batch of trees."""
    width = int(geometry.mask_words) * 32
    bits = torch.zeros(num_rows, width, dtype=torch.int64)
    depth = [level for one in requests for level in one.depth]
    first = 0
    for one in requests:
        bits[first : first + one.rows, : one.tail] = one.seen[one.tail - one.rows :].long()
        first += one.rows
    packed = (bits.view(num_rows, -1, 32) << torch.arange(32)).sum(-1)
    mask = torch.where(packed >= 2**31, packed - 2**32, packed).int().to(device)
    if mode is Mode.RAGGED_VERIFY:
        return Tree(mask, torch.tensor(depth + [0] * (num_rows - len(depth)), dtype=torch.int32, device=device))
    return Tree(mask, torch.tensor(depth, dtype=torch.int32, device=device).view(len(requests), -1))
