"""The core's static batch buffers, filled with a forward of an attention layer or of a layer with recurrent state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark.batch import BatchBuffers, Chosen, ForwardBatch, Tree
from draftmark.batch import ragged as ragged_batch
from draftmark.geometry import Geometry, Mode, StateGeometry
from draftmark.lengths import Exact, HostLengths, Unknown, UpperBound

from ..cases.forwards import ForwardCase
from ..oracle.formulas import WHOLE_REQUEST, max_prefix, page_size_of
from ..oracle.history import NO_PARENT, Request

STALE = (2**31 - 1, -(2**31), -1, 2**30)
"""Entries after a list's count, next to slots of NaN. No pool has them."""


class BatchTensors:
    """Holds the static batch tensors of an engine. Parts that a forward does not use are stale."""

    geometry: Any

    def __init__(self, geometry: Geometry | StateGeometry, device: str) -> None:
        self.geometry = geometry
        self.buffers = BatchBuffers(geometry, device)

    def dirty(self, page: int) -> None:
        """Fill the static buffers with stale values, as an earlier and longer batch leaves them."""
        b = self.buffers
        b.prefix_lens.fill_(self.geometry.limits.max_context_len)
        b.page_table.fill_(page)
        b.positions.fill_(self.geometry.limits.max_context_len - 1)
        b.mask.fill_(-1)
        b.depth.fill_(3)
        if b.q_indptr is not None:
            b.q_indptr.fill_(b.positions.numel())
        if b.slots is not None:
            b.slots.fill_(-1)
        if b.parents is not None:
            b.parents.fill_(2)
        if b.chosen is not None:
            b.chosen.slots.fill_(STALE[0])
            b.chosen.counts.fill_(STALE[0])
        if b.state_slots is not None:
            b.state_slots.fill_(page)

    def empty(self) -> None:
        """Fill the static buffers with a batch of empty requests on null pages."""
        b = self.buffers
        for tensor in (b.prefix_lens, b.page_table, b.positions, b.mask, b.depth, b.parents, b.state_slots):
            if tensor is not None:
                tensor.zero_()
        if b.chosen is not None:
            b.chosen.counts.zero_()

    def place(self, forward: ForwardCase) -> torch.Tensor:
        """Fill the part of the buffers that says where a request lies. Return the forward's page table."""
        return self.buffers.page_table[: len(forward.requests)]

    def copy_to(self, other: Any) -> None:
        """Copy the batch to the buffers of `other`. Capturable."""
        names = ("prefix_lens", "page_table", "positions", "mask", "depth", "q_indptr", "parents", "state_slots")
        for name in names:
            if getattr(self.buffers, name) is not None:
                getattr(other.buffers, name).copy_(getattr(self.buffers, name))
        if self.buffers.chosen is not None:
            other.buffers.chosen.slots.copy_(self.buffers.chosen.slots)
            other.buffers.chosen.counts.copy_(self.buffers.chosen.counts)

    def set(self, forward: ForwardCase, host: str = "exact") -> ForwardBatch:
        """Fill the part of the static buffers that the forward uses, and leave the rest unchanged."""
        b, r, g = self.buffers, len(forward.requests), forward.geometry
        b.prefix_lens[:r] = torch.tensor([one.prefix for one in forward.requests], dtype=torch.int32)
        table, state_slots = self.place(forward), None if b.state_slots is None else b.state_slots[:r]
        lens, slots = host_lengths(forward, host), self._fill_slots(forward)
        lists = self.fill_lists(forward)
        if forward.mode is Mode.EXTEND:
            q_lens = tuple(one.rows for one in forward.requests)
            return ragged_batch(g, b.prefix_lens[:r], table, q_lens, lens, forward.live, slots, state_slots, lists)
        if b.q_indptr is not None and forward.mode is Mode.RAGGED_VERIFY:
            counts = torch.tensor([0, *(one.rows for one in forward.requests)])
            b.q_indptr[: r + 1] = counts.cumsum(0).int()
        batch = replace(self.batch_of(forward, lens), page_table=table)
        positions = torch.tensor(_positions(forward), dtype=torch.int64)
        batch.positions[: len(positions)].copy_(positions)
        if isinstance(batch.tail, Tree):
            mask = torch.tensor(_mask(forward, b.mask.shape[1]), dtype=torch.int32)
            batch.tail.mask[: len(positions)] = mask.view(-1, b.mask.shape[1])
            depth = torch.tensor(_depth(forward), dtype=torch.int32)
            batch.tail.depth[: len(depth)] = depth
            if batch.tail.parents is not None:
                batch.tail.parents[: len(depth)] = torch.tensor(_parents(forward), dtype=torch.int32)
        return batch

    def batch_of(self, forward: ForwardCase, lens: HostLengths) -> ForwardBatch:
        """Return the batch of a forward, except a prefill, over the static buffers, whatever they contain."""
        b, r = self.buffers, len(forward.requests)
        tree = not forward.causal and forward.mode is not Mode.DRAFT_BLOCK
        if b.q_indptr is None or forward.mode is not Mode.RAGGED_VERIFY:
            causal = forward.causal_block
            return b.uniform(forward.mode, forward.step, r, forward.live, lens, tree=tree, causal=causal)
        bounds = forward.bounds and (*forward.bounds, *[0] * (r - len(forward.bounds)))
        return b.ragged_verify(forward.budget, forward.live, lens, tree=tree, padded_reqs=r, q_bounds=bounds or None)

    def fill_lists(self, forward: ForwardCase) -> Chosen | None:
        """Write the list of each row, with stale entries after its count. Lists of padding rows stay as they are."""
        if self.buffers.chosen is None:
            return None
        slots, counts = (one[: forward.num_rows] for one in (self.buffers.chosen.slots, self.buffers.chosen.counts))
        lists, width = [forward.lists[row] for row in forward.rows], slots.shape[1]
        trap = (forward.num_pages - 1) * page_size_of(forward.geometry)
        stale = torch.tensor([*STALE, trap], dtype=torch.int32).repeat(width)
        filled = torch.stack([stale[n % len(STALE) :][:width] for n in range(len(lists))] or [stale[:0].view(0, width)])
        for n, entries in enumerate(lists):
            filled[n, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
        slots[: len(lists)] = filled
        counts[: len(lists)] = torch.tensor([len(entries) for entries in lists], dtype=torch.int32)
        return Chosen(slots, counts)

    def dirty_lists(self, forward: ForwardCase) -> None:
        """Fill a forward's lists with numbers that no pool has."""
        assert self.buffers.chosen is not None, "the layer has lists"
        self.buffers.chosen.slots[: forward.num_rows] = STALE[0]
        self.buffers.chosen.counts[: forward.num_rows] = STALE[0]

    def _fill_slots(self, forward: ForwardCase) -> torch.Tensor | None:
        """Write the engine's KV slot of each row; -1 for rows that are not stored and for padding rows."""
        if self.buffers.slots is None:
            return None
        slots = self.buffers.slots[: forward.num_rows]
        own = list(forward.slots.values())
        slots.copy_(torch.tensor([*own, *[-1] * (len(slots) - len(own))], dtype=torch.int64))
        return slots


def host_lengths(forward: ForwardCase, kind: str) -> HostLengths:
    """Return the host lengths of a forward.

    Args:
        kind: ``"exact"``, ``"upper_bound"`` (larger than the length), ``"tight_bound"`` (equal to the length),
            ``"mixed_bound"`` (equal for every other request), or ``"unknown"``.
    """
    lens = tuple(one.prefix for one in forward.requests if one.live)
    limits, wall = forward.geometry.limits, max_prefix(forward.geometry)
    if kind == "exact":
        return Exact(lens)
    if kind == "tight_bound":
        return UpperBound(lens)
    if kind in ("upper_bound", "mixed_bound"):
        size = page_size_of(forward.geometry)
        loose = 2 * (size if size < WHOLE_REQUEST else 16) + 1
        every = 1 if kind == "upper_bound" else 2
        return UpperBound(tuple(min(n + loose * ((i + 1) % every == 0), wall) for i, n in enumerate(lens)))
    return Unknown(len(lens), wall if forward.mode is not Mode.EXTEND else limits.max_context_len)


def _positions(forward: ForwardCase) -> list[int]:
    wall = forward.geometry.limits.max_context_len - 1
    requests = forward.requests
    return [min(requests[n].prefix + requests[n].depth(requests[n].own_slot(row)), wall) for n, row in forward.rows]


def _mask(forward: ForwardCase, words: int) -> list[list[int]]:
    return [mask_words(forward.requests[n], row, words) for n, row in forward.rows]


def mask_words(request: Request, row: int, words: int) -> list[int]:
    """Return a row's mask as signed 32-bit words, bit j in word j // 32. A padded row sees only itself."""
    own, packed = request.own_slot(row), [0] * words
    for slot in request.seen(own) if request.live else [own]:
        packed[slot // 32] |= 1 << slot % 32
    return [word - 2**32 if word >= 2**31 else word for word in packed]


def _depth(forward: ForwardCase) -> list[list[int]] | list[int]:
    """Return the depths of each request's tail slots, or of each row in RAGGED_VERIFY."""
    if forward.mode is Mode.RAGGED_VERIFY:
        return [forward.requests[n].depth(row) for n, row in forward.rows]
    return [[one.depth(slot) if one.live else 0 for slot in range(one.tail)] for one in forward.requests]


def _parents(forward: ForwardCase) -> list[list[int]] | list[int]:
    """Return the parents of each request's tail slots, or of each row in RAGGED_VERIFY. A padded row has none."""
    if forward.mode is Mode.RAGGED_VERIFY:
        return [forward.requests[n].parents[row] for n, row in forward.rows]
    return [list(one.parents) if one.live else [NO_PARENT] * one.tail for one in forward.requests]
