"""Mutants of the classes F to K: sizes, pools, batch invariance, forks, other processes, features at size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Mode
from draftmark.runtime import ForwardBatch, KVCache, Tree

from ...designs import csr_attention
from ...designs.changes import on_cache
from ...designs.tutorial import Plugin
from ...designs.tutorial_parts import TutorialParts, opens
from ...mutant import ONLY, Mutant, around, on_batch, standalone

CSR: dict[str, Any] = {"layouts": ("csr",), "absent": "tried in csr"}
TRITON: dict[str, Any] = {"layouts": ("cuda_triton",), "absent": "tried in cuda_triton"}
TUTORIAL: dict[str, Any] = {"layouts": ("tutorial",), "absent": ONLY}


# F: sizes as a space


class OddGroups(TutorialParts):
    """Reads the KV head of the row before where the group is no power of two."""

    def pages(self, one: Tensor, table: Tensor) -> Tensor:
        found, group = super().pages(one, table), self.shape.group_size
        return found.roll(1, dims=1) if group > 4 and group & (group - 1) else found


def _lost_requests(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Give the requests after the 64th the length of a whole number of pages, in batches of up to 128 requests."""
    if not 64 < batch.padded_reqs <= 128 or not batch.uniform:
        return batch
    lens, size = batch.prefix_lens.clone(), backend.geometry.attention.page_size
    lens[64:] -= lens[64:] % size
    return replace(batch, prefix_lens=lens)


# G: pools as engines have them


def _packed_heads(cache: KVCache) -> KVCache:
    """Read K with a head stride of head_dim, whatever its real stride is."""
    if cache.k.stride(2) == cache.k.shape[3] or cache.k.shape[2] == 1:
        return cache
    pages, size, heads, dim = cache.k.shape
    strides = (cache.k.stride(0), cache.k.stride(1), dim, 1)
    return replace(cache, k=cache.k.as_strided((pages, size, heads, dim), strides))


def _first_layer(cache: KVCache) -> KVCache:
    """Use the memory at the beginning of the pool for every layer of the pool."""
    k, v = (one.as_strided(one.shape, one.stride(), 0) for one in (cache.k, cache.v))
    return replace(cache, k=k, v=v)


# H: batch invariance


class OddPlaces(TutorialParts):
    """Sums the keys of requests at odd places of the batch from the last key to the first."""

    place = 0

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        self.place = 0
        super().attend(q, cache, batch, out)

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        self.place += 1
        if self.place % 2:
            return super().weights(scores, seen)
        return super().weights(scores.flip(-1), seen.flip(-1)).flip(-1)


class Invariant(Plugin):
    """The tutorial's plugin, which attends request by request, with the claim that this makes it batch invariant."""

    info = replace(Plugin.info, batch_invariant=True)


def _long_neighbour(backend: Any) -> None:
    """Sum keys from the last to the first in every request if a request of the batch has more than 256 keys."""

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        right = csr_attention.attend
        longest = int(batch.prefix_lens.max()) if len(batch.prefix_lens) else 0

        def flipped(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *more: Any) -> Tensor:
            return right(q, k.flip(1), v.flip(1), seen.flip(2), *more)

        csr_attention.attend = flipped if longest > 256 else right
        try:
            original(q, cache, batch, out)
        finally:
            csr_attention.attend = right

    around(backend, "attend", attend)


# I: forks


def _leader(batch: ForwardBatch, *facts: Tensor) -> Tensor:
    """Return for each request the first request with equal facts, int64 ``[R]``."""
    return torch.stack([one[:, None] == one for one in facts]).all(0).int().argmax(1)


def _last_page_of_leader(backend: Any) -> None:
    """Read the last page of a fork from the first fork with its first page and its number of pages."""
    size = backend.geometry.attention.page_size

    def write(original: Any, batch: ForwardBatch, indptr: Tensor) -> None:
        table, pages = batch.page_table.clone(), (batch.prefix_lens + size - 1) // size
        last = (pages - 1).clamp(min=0).long()
        leader = torch.where(pages > 1, _leader(batch, table[:, 0], pages), torch.arange(len(pages)))
        rows = torch.arange(len(pages))
        table[rows, last] = batch.page_table[leader, last]
        original(replace(batch, page_table=table), indptr)

    around(backend, "_write_indices", write)


def _mask_of_leader(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Give forks with one first page and one length the tree of the first of them."""
    if not isinstance(batch.tail, Tree) or not batch.uniform or not batch.q_lens[0]:
        return batch
    leader = _leader(batch, batch.page_table[:, 0], batch.prefix_lens)
    leader = torch.where(batch.prefix_lens > 0, leader, torch.arange(len(leader)))
    mask = batch.tail.mask.view(batch.padded_reqs, batch.q_lens[0], -1)[leader].reshape(batch.tail.mask.shape)
    return replace(batch, tail=replace(batch.tail, mask=mask, depth=batch.tail.depth[leader]))


# K: features at production size


def _values_of_a_crowd(cache: KVCache, batch: ForwardBatch) -> KVCache:
    """Leave the V scale out in batches of more than 16 requests."""
    crowd = cache.v_scale is not None and batch.padded_reqs > 16
    return replace(cache, v_scale=torch.ones_like(cache.v_scale)) if crowd else cache


def _unscaled_crowd(backend: Any) -> None:
    around(
        backend,
        "attend",
        lambda original, q, cache, batch, out: original(q, _values_of_a_crowd(cache, batch), batch, out),
    )


class SlotsInWindow(TutorialParts):
    """Counts the window of rows after the 32nd in slots, not in positions."""

    def _visible(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        right = batch
        if isinstance(batch.tail, Tree) and tail_len > 32 and self.window >= 0:
            depth = batch.tail.depth.clone()
            depth[:, 32:] = torch.arange(32, tail_len, dtype=depth.dtype)
            right = replace(batch, tail=replace(batch.tail, depth=depth))
        return super()._visible(right, request, rows, prefix, tail_len)


def _cap_of_short_prefixes(backend: Any) -> None:
    """Leave the soft cap out of drafts and verifies of more than 700 keys."""
    verify = getattr(backend, "_decode_verify", None)
    if verify is None:
        return

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        own = verify._shape
        if own.cap > 0 and batch.mode in (Mode.DRAFT, Mode.VERIFY) and int(batch.prefix_lens.max()) > 700:
            verify._shape = replace(own, cap=0.0)
        original(q, cache, batch, out)
        verify._shape = own

    around(backend, "attend", attend)


MUTANTS = (
    Mutant("OF6", "Reads the wrong KV head in groups of 5, 6 or 7 and more", "GQA groups of Qwen2 (28/4)",
           plugin=opens(OddGroups), **TUTORIAL),
    Mutant("OF7", "Loses the last keys of requests after the 64th in batches of 65 to 128", "a second block of threads",
           patch=on_batch(_lost_requests, "write_metadata", "attend"), **TRITON),
    Mutant("OG5", "Reads K heads as if they lay next to each other", "K and V of a head side by side",
           patch=on_cache(_packed_heads, "attend"), **TRITON),
    Mutant("OG6", "Uses the memory of the first layer for every layer of a pool", "a storage offset that is lost",
           patch=on_cache(_first_layer), **CSR),
    Mutant("OH4", "Sums keys from the end for requests at odd places", "two warps by turns",
           plugin=opens(OddPlaces, Invariant), **TUTORIAL),
    Mutant("OH5", "Sums keys from the end if a neighbour has more than 256 keys", "a kernel chosen by the longest",
           patch=_long_neighbour, **CSR),
    Mutant("OI4", "Reads a fork's last page from the first fork of as many pages", "copy on write",
           patch=_last_page_of_leader, **CSR),
    Mutant("OI5", "Gives forks of one length the draft tree of the first", "a mask for each group",
           patch=on_batch(_mask_of_leader, "write_metadata", "attend"), **TRITON),
    Mutant("OJ5", "Lists its buffers in the order of a set of strings", "PYTHONHASHSEED",
           **standalone("blind_processes:OJ5", "csr")),
    Mutant("OJ6", "Sizes scratch by the processors that the process may use", "sched_getaffinity",
           **standalone("blind_processes:OJ6", "csr")),
    Mutant("OK7", "Leaves the V scale out of batches of more than 16 requests", "fp8 in a crowd",
           patch=_unscaled_crowd, **CSR),
    Mutant("OK8", "Counts the window of rows after the 32nd in slots", "windows of wide trees",
           plugin=opens(SlotsInWindow), **TUTORIAL),
    Mutant("OK9", "Leaves the soft cap out of drafts and verifies of more than 700 keys", "Gemma 2 at length",
           patch=_cap_of_short_prefixes, **TRITON),
)  # fmt: skip
KILLER = {
    "OF6": "sizes.may_be_any",
    "OF7": "sizes.may_be_any_number_of_rows",
    "OG5": "engine.forms_are_taken_as_they_are",
    "OG6": "layers.have_their_own_caches",
    **dict.fromkeys(("OH4", "OH5"), "batch_invariance.holds_in_any_batch"),
    **dict.fromkeys(("OI4", "OI5"), "forks.are_requests_of_their_own"),
    **dict.fromkeys(("OJ5", "OJ6"), "supports.answers_alike_elsewhere"),
    "OK7": "production.a_crowd_is_right",
    **dict.fromkeys(("OK8", "OK9"), "production.profiles_are_right_together"),
}
