"""Mutants that the checks of `lengths` kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Mode
from draftmark.runtime import ForwardBatch, KVCache, Unknown, UpperBound

from ..designs.changes import on_host_lengths, on_prefix, pages_for, within_a_tile
from ..designs.layouts import CSR, SIZED_BY_CORE, of_tutorial
from ..designs.tutorial import Backend
from ..designs.tutorial_parts import TutorialParts, opens
from ..designs.tutorial_plans import bounds_of, plugin
from ..mutant import Mutant, around, resized


def _written_once(backend: Any) -> None:
    """Skip write_metadata while mode, step and row counts are those of the previous batch."""
    last: list[Any] = [None]

    def call(original: Any, batch: ForwardBatch) -> None:
        key = (batch.mode, batch.step, batch.q_lens)
        if key != last[0]:
            last[0] = key
            original(batch)

    around(backend, "write_metadata", call)


class PathOnly(TutorialParts):
    """Keeps only the depth + 1 nearest visible slots of a mask row, which drops bits if the mask is not a tree."""

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        bits = super().tree_bits(words, slot, depth, prefix)
        return bits & (bits.flip(1).cumsum(1).flip(1) <= depth[:, None] + 1)


class TailTile(TutorialParts):
    """Reads the keys of the draft tree from one aligned tile of 128 keys, and drops keys in the next tile."""

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        bits = super().tree_bits(words, slot, depth, prefix)
        return bits & (slot < 128 - prefix % 128)


class IdleRank(Backend):
    """Returns without writing `out` when a batch has no live request, although a later all-to-all reads `out`."""

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        if batch.num_reqs:
            super().attend(q, cache, batch, out)


CHUNK = 128


class EmptySplit(Backend):
    """Splits the prefix into parts of 128 keys by the host's bound. A part without keys on the device gives NaN.

    Exact lengths give no empty part, and Unknown lengths (every capture) are not split. With overlap, the host's bound
    may pass a multiple of 128 that the device's length does not pass. That gives an empty part.
    """

    parts: tuple[int, ...] = ()

    def plan(self, batch: ForwardBatch) -> None:
        split = not isinstance(batch.host, Unknown) and self.shape.window_left < 0
        self.parts = tuple(-(-n // CHUNK) if split else 0 for n in bounds_of(batch))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        super().attend(q, cache, batch, out)
        first, key = 0, torch.arange(self.width, device=q.device)
        for request, (n, tail) in enumerate(zip(batch.q_lens, batch.tail_lens, strict=True)):
            rows, parts = slice(first, first + n), self.parts[request]
            first += n
            if n == 0 or parts < 2:
                continue
            prefix, table = batch.prefix_lens[request].long(), batch.page_table[request]
            live = (key < prefix + tail)[:, None, None]
            k, v = (torch.where(live, one[table].flatten(0, 1).float(), 0.0) for one in (cache.k, cache.v))
            k, v = (one.repeat_interleave(self.shape.group_size, dim=1) for one in (k, v))
            scores = torch.einsum("qhd,nhd->hqn", q[rows].float(), k) * self.scale
            seen, part = self._visible(batch, request, rows, prefix, tail), torch.where(key < prefix, key // CHUNK, -1)
            masked = [scores.masked_fill(~(seen & (part == i)), float("-inf")) for i in range(-1, parts)]
            outs = torch.stack([torch.einsum("hqn,nhd->qhd", one.softmax(-1), v) for one in masked])
            weight = torch.stack([one.logsumexp(-1).T for one in masked]).softmax(0)
            out[rows] = (weight[..., None] * outs).sum(0).to(out.dtype)


def _unless_same(key: Callable[[ForwardBatch], Any]) -> Callable[[Any], None]:
    """Return a patch that skips write_metadata while `key` is unchanged."""

    def patch(backend: Any) -> None:
        last: list[Any] = [None]

        def call(original: Any, batch: ForwardBatch) -> None:
            if last[0] != key(batch):
                last[0] = key(batch)
                original(batch)

        around(backend, "write_metadata", call)

    return patch


def _padding_once(backend: Any) -> None:
    """Write the slots of padded rows only for the first batch of each size."""
    seen: set[Any] = set()

    def call(original: Any, batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"]
        kept = slots.clone()
        original(batch)
        key = (batch.mode, batch.step, batch.padded_reqs, batch.num_reqs)
        if key in seen and batch.uniform:
            first = batch.num_reqs * batch.q_lens[0]
            slots[first : batch.num_rows] = kept[first : batch.num_rows]
        seen.add(key)

    around(backend, "write_metadata", call)


def _first_bound(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    bounds = batch.host.upper_bound()
    return replace(batch, host=UpperBound(bounds[:1] * len(bounds)))


def _mean_bound(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    bounds = batch.host.upper_bound()
    return replace(batch, host=UpperBound((sum(bounds) // max(1, len(bounds)),) * len(bounds)))


MUTANTS = (
    Mutant(
        "M03",
        "Sizes KV pages from the context limit instead of the page table's width",
        "sglang#29665",
        resized("kv_indices", lambda g, s: pages_for(g, g.limits.max_context_len + g.max_tail)),
        layouts=CSR,
        absent=SIZED_BY_CORE,
    ),
    of_tutorial(
        "S11",
        "Converts a mask row to a path of depth + 1 ancestors",
        "lookahead and n-gram pools have rows that see more than a root path, at equal depths",
        opens(PathOnly),
    ),
    of_tutorial(
        "S12",
        "Loses the part of a tree tail after a multiple of 128 keys",
        "block-aligned mask tiles; only if L % 128 + T > 128, so never for short prefixes",
        opens(TailTile),
    ),
    of_tutorial(
        "S46",
        "Leaves the output unwritten in an eager batch without live requests",
        "an idle data-parallel rank: uninitialised rows reach the all-to-all of the experts",
        plugin(IdleRank),
    ),
    of_tutorial(
        "S47",
        "Splits KV by the host's bound, and gives NaN for a part that is empty on the device",
        "split-KV combine with an empty part; overlap scheduling near a multiple of the part size",
        plugin(EmptySplit),
    ),
    Mutant(
        "V06",
        "Clamps lengths to the context limit",
        "TRT-LLM#16280",
        patch=on_prefix(lambda b, x: x.prefix_lens.clamp(max=b.geometry.limits.max_context_len)),
    ),
    Mutant("V58", "Keeps the metadata while mode and size are unchanged", "rtp-llm#1084", patch=_written_once),
    Mutant("W65", "Keeps the metadata while the host's lengths are unchanged", "rtp-llm#1084",
           patch=_unless_same(lambda x: (x.mode, x.step, x.q_lens, x.host.upper_bound()))),
    Mutant("W66", "Keeps the metadata while the number of live requests is unchanged", "TRT-LLM#17110",
           patch=_unless_same(lambda x: (x.mode, x.step, x.num_reqs, x.padded_reqs))),
    Mutant("W67", "Writes padding only for the first batch of a size", "sglang#24743", patch=_padding_once),
    Mutant("W79", "Uses the first request's bound for all requests", "sglang#26738",
           patch=on_host_lengths(_first_bound)),
    Mutant("W80", "Uses the mean bound for all requests", "sglang#32467", patch=on_host_lengths(_mean_bound)),
    Mutant("Z12b", "Stores draft rows of a page's second half in the first half", "sglang#24587",
           patch=within_a_tile(Mode.DRAFT, Mode.DRAFT_EXTEND)),
)  # fmt: skip
KILLER = dict.fromkeys(
    (
        "S11",
        "S12",
        "S46",
        "S47",
    ),
    "lengths.of_any_kind_give_one_result",
)
