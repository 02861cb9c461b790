"""Parts that several mutants share: changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry, Mode, ceil_div
from draftmark.runtime import Causal, ForwardBatch, KVCache, Tree

from ..mutant import after, around, on_batch
from .plain_attention import Parts


def edit(change: Callable[[Any, ForwardBatch], None]) -> Callable[[Any], None]:
    """Return a patch that changes the arena after write_metadata."""
    return lambda backend: after(backend, "write_metadata", lambda batch: change(backend, batch))


def on_prefix(change: Any, *modes: Mode, methods: tuple[str, ...] = ()) -> Any:
    """Return a patch that changes the prefix lengths, in some modes or in every mode."""

    def see(backend: Any, batch: ForwardBatch) -> ForwardBatch:
        if modes and batch.mode not in modes:
            return batch
        return replace(batch, prefix_lens=change(backend, batch))

    return on_batch(see, *(methods or ("write_metadata", "attend")))


def on_tail(change: Any) -> Any:
    """Return a patch that changes the mask or the depths of the draft tree, if the batch has a tree."""

    def see(backend: Any, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, tail=change(batch)) if isinstance(batch.tail, Tree) else batch

    return on_batch(see, "write_metadata", "attend")


def bits(mask: torch.Tensor) -> torch.Tensor:
    """Unpack int32 words ``[rows, words]`` into bool ``[rows, words, 32]``."""
    return (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1 == 1


def words(unpacked: torch.Tensor) -> torch.Tensor:
    """Pack bool ``[rows, words, 32]`` into int32 words; the inverse of `bits`."""
    weights = torch.bitwise_left_shift(torch.ones(32, dtype=torch.int64, device=unpacked.device), torch.arange(32))
    return (unpacked.long() * weights).sum(-1).to(torch.int32)


def live_only(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    n = batch.num_reqs
    rows = sum(batch.q_lens[:n])
    kept = batch.tail if isinstance(batch.tail, Causal) else Tree(batch.tail.mask[:rows], batch.tail.depth[:n])
    if n == 0:
        return batch
    return replace(
        batch,
        prefix_lens=batch.prefix_lens[:n],
        q_indptr=batch.q_indptr[: n + 1],
        page_table=batch.page_table[:n],
        positions=batch.positions[:rows],
        q_lens=batch.q_lens[:n],
        tail_lens=batch.tail_lens[:n],
        tail=kept,
    )


def on_indptr(change: Any) -> Any:
    return on_batch(lambda b, batch: replace(batch, q_indptr=change(b, batch)), "write_metadata")


def on_table(change: Any) -> Any:
    return on_batch(lambda b, batch: replace(batch, page_table=change(b, batch)), "write_metadata", "attend")


def clears_slots(backend: Any) -> None:
    """Clear the slots before each metadata launch, so that a row that the launch misses writes to the null page."""

    def write(original: Any, batch: ForwardBatch) -> None:
        backend._slots[: batch.num_rows].zero_()
        original(batch)

    around(backend, "write_metadata", write)


def placed(change: Callable[[Any, ForwardBatch, torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Return a patch that computes the slots of a batch's rows from their KV positions by another formula."""

    def write(backend: Any, batch: ForwardBatch) -> None:
        row = torch.arange(batch.num_rows, dtype=torch.int32)
        request = torch.searchsorted(batch.q_indptr, row, right=True) - 1
        tails = torch.full_like(batch.prefix_lens, batch.tail_lens[0]) if batch.uniform else batch.q_indptr.diff()
        position = (batch.prefix_lens + tails)[request] - (batch.q_indptr[request + 1] - row)
        backend.arena["slot_mapping"][: batch.num_rows] = change(backend, batch, request, position.long())

    return edit(write)


def slot_of(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    size = backend.geometry.attention.page_size
    return batch.page_table[request, (position // size).long()].long() * size + position % size


TILE = 64
"""Tile size, in tokens, of a kernel that was written for smaller pages."""


def within_a_tile(*modes: Mode) -> Any:
    """Compute offsets in a page modulo a tile, so slots of larger pages alias each other."""

    def change(backend: Any, batch: ForwardBatch, request: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        size = backend.geometry.attention.page_size
        offset = position % size
        if batch.mode in modes and size % TILE == 0:
            offset = offset % TILE
        return batch.page_table[request, position // size].long() * size + offset

    return placed(change)


def on_queries(change: Callable[[Any, torch.Tensor], torch.Tensor], back: Any = None) -> Callable[[Any], None]:
    """Return a patch that changes the queries of attend and, if `back` is given, reorders its output."""

    def patch(backend: Any) -> None:
        def call(original: Any, q: Any, cache: Any, batch: Any, out: Any) -> None:
            original(change(backend, q), cache, batch, out)
            if back is not None:
                out.copy_(back(backend, out))

        around(backend, "attend", call)

    return patch


def key_lost(at: int) -> Parts:
    """Hide key `at - 1` of every prefix longer than `at`, like a split-KV kernel that drops a split's last key."""
    return Parts(
        seen=lambda seen, prefix, shape: (
            seen & ~((torch.arange(seen.shape[2]) == at - 1) & (prefix[:, None] > at))[:, None]
        )
    )


FIRST: dict[str, int] = {}


def on_cache(change: Callable[[KVCache], KVCache], *methods: str) -> Callable[[Any], None]:
    """Return a patch that passes a changed cache to `write_kv` and `attend`, or to one of them."""

    def patch(backend: Any) -> None:
        for method in methods or ("write_kv", "attend"):
            at = {"write_kv": 2, "attend": 1}[method]

            def call(original: Callable[..., None], *args: Any, _at: int = at) -> None:
                original(*args[:_at], change(args[_at]), *args[_at + 1 :])

            around(backend, method, call)

    return patch


def pages_for(geometry: Geometry, tokens: Any) -> tuple[int, ...]:
    return (geometry.max_reqs * ceil_div(tokens, geometry.attention.page_size),)


def on_host_lengths(change: Callable[[Any, ForwardBatch], ForwardBatch]) -> Callable[[Any], None]:
    return lambda backend: around(backend, "plan", lambda original, batch: original(change(backend, batch)))
