"""Mutants that checks of `production` kill: shapes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Mode
from draftmark.runtime import ForwardBatch, Tree

from ...designs.changes import clears_slots
from ...designs.layouts import READS_NO_TABLE, of_tutorial
from ...designs.tutorial_parts import TutorialParts, opens
from ...mutant import Mutant, around, on_batch


class Mask64(TutorialParts):
    """Loads a mask row as one 64-bit word, so tail slot s from 64 on reads bit s % 64."""

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        return super().tree_bits(words, slot % 64, depth, prefix)


class PackedGroup(TutorialParts):
    """Packs rows × group into tiles of 64 and divides by the group with a shift, so a group of 7 counts as 8."""

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        q_len, group = len(seen), self.shape.group_size
        if q_len * group <= 64:
            return super().weights(scores, seen)
        head = torch.arange(scores.shape[0], device=seen.device)[:, None] % group
        packed = torch.arange(q_len, device=seen.device) * group + head
        return super().weights(scores, seen[packed >> (group - 1).bit_length()])


def _scale_of_first_keys(backend: Any) -> None:
    """Apply the K scale of an e4m3 cache to the logits of the first 1,024 keys only."""
    most = 1024

    def attend(original: Any, q: torch.Tensor, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        size = backend.geometry.attention.page_size
        if cache.k_scale is None or max(backend._widths) * size <= most:
            original(q, cache, batch, out)
            return
        table, k = backend.arena["kv_indices"], cache.k.float() * cache.k_scale
        start = backend.arena["kv_indptr"][: batch.padded_reqs].long()
        late = torch.zeros(k.shape[0], dtype=torch.bool, device=k.device)
        for request in range(batch.padded_reqs):
            page = start[request] + torch.arange(most // size, max(backend._widths[request], most // size))
            end = backend.arena["kv_indptr"][request + 1]
            mine = table[page.clamp(max=table.shape[0] - 1)].long().clamp(0, k.shape[0] - 1)
            late[mine] |= page < end
        k = torch.where(late[:, None, None, None], cache.k.float(), k)
        v = cache.v.float() if cache.v_scale is None else cache.v.float() * cache.v_scale
        original(q, type(cache)(k, v, sinks=cache.sinks), batch, out)

    around(backend, "attend", attend)


def _window_of_last_row(backend: Any) -> None:
    """Skip tiles of a long draft block by the window of its last row, for all its rows."""

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        right, window = backend.geometry, backend.geometry.attention.window_left
        longest = max(batch.host.upper_bound(), default=0)
        if batch.mode is Mode.DRAFT_BLOCK and window >= batch.q_lens[0] and longest > 1024:
            narrow = replace(right.attention, window_left=window - batch.q_lens[0] + 1)
            backend.geometry = replace(right, attention=narrow)
        original(q, cache, batch, out)
        backend.geometry = right

    around(backend, "attend", attend)


def _negligible_sinks(backend: Any) -> None:
    """Leave the sinks out of batches with more than 2,048 keys, where their share is thought to be negligible."""

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        if cache.sinks is not None and max(backend._widths) * backend.geometry.attention.page_size > 2048:
            cache = replace(cache, sinks=torch.full_like(cache.sinks, float("-inf")))
        original(q, cache, batch, out)

    around(backend, "attend", attend)


def _budget_per_request(backend: Any) -> None:
    """Plan a ragged batch of more than 256 rows for its average rows, not for the most rows of one request."""
    verify, plans = backend._decode_verify, {}

    def plan_of(original: Any, batch: ForwardBatch) -> Any:
        found = original(batch)
        if batch.mode is not Mode.RAGGED_VERIFY or batch.num_rows <= 256:
            return found
        average = -(-batch.num_rows // batch.padded_reqs)
        if average >= found.extent.q_len:
            return found
        extent = replace(found.extent, q_len=average)
        return plans.setdefault(found, replace(found, extent=extent))

    around(verify, "_plan_of", plan_of)
    clears_slots(backend)


def _causal_over_e4m3(backend: Any) -> None:
    """Leave the block flag out of launches over e4m3 KV, so that a draft block has a causal tail."""
    verify = backend._decode_verify

    def facts(batch: ForwardBatch) -> Any:
        (plan, block, *pitches), *tail = verify._batch_facts(batch)
        eight_bits = backend.geometry.attention.kv_dtype == "float8_e4m3fn"
        return (plan, block and not eight_bits, *pitches), *tail

    verify._facts = facts


def _shift_modulo(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Read a mask row as one 64-bit number: slots from 64 on read the bits of slots 0, 1, …"""
    if not isinstance(batch.tail, Tree):
        return batch
    word = torch.arange(batch.tail.mask.shape[1]) % 2
    return replace(batch, tail=Tree(batch.tail.mask[:, word], batch.tail.depth))


def _table_of_512(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    columns = torch.arange(batch.page_table.shape[1]).clamp(max=511)
    return replace(batch, page_table=batch.page_table[:, columns])


def _mask_of_the_last(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """In a batch of more than 8 requests with more than 32 slots each, use the previous request's mask."""
    if batch.mode is not Mode.VERIFY or not isinstance(batch.tail, Tree):
        return batch
    slots = batch.tail_lens[0]
    if batch.padded_reqs <= 8 or slots <= 32:
        return batch
    return replace(batch, tail=Tree(batch.tail.mask.roll(slots, 0), batch.tail.depth))


MUTANTS = (
    Mutant("OK1", "Applies the e4m3 K scale to the first 1,024 keys only", "fp8 at production length",
           patch=_scale_of_first_keys, layouts=("csr",), absent="the reference refuses fp8 KV"),
    Mutant("OK2", "Uses the last row's window for all rows of a long draft block", "windows and blocks at length",
           patch=_window_of_last_row, layouts=("reference",), absent="csr does not serve DRAFT_BLOCK"),
    Mutant("OK3", "Leaves the sinks out of batches with more than 2,048 keys", "sinks at production length",
           patch=_negligible_sinks, layouts=("csr",), absent="tried in csr"),
    Mutant("OK4", "Plans ragged batches of more than 256 rows for the average rows", "adaptive drafting in a crowd",
           patch=_budget_per_request, layouts=("cuda_triton",), absent="a plan of cuda_triton's host code"),
    Mutant("OK5", "Gives draft blocks over e4m3 KV a causal tail", "two features that do not meet",
           patch=_causal_over_e4m3, layouts=("cuda_triton",), absent="csr does not serve DRAFT_BLOCK"),
    Mutant("R27", "Shifts mask words modulo 64", "–", patch=on_batch(_shift_modulo)),
    of_tutorial(
        "S10",
        "Reads tail masks as 64 bits",
        "topk 8 with 10 steps drafts over 72 slots; masks up to 64 slots are right",
        opens(Mask64),
    ),
    of_tutorial(
        "S13",
        "Finds mask rows of packed GQA tiles by a shift, for groups that are no power of two",
        "Qwen 28/4 (group 7) with 10 or more draft tokens",
        opens(PackedGroup),
    ),
    Mutant("T07", "Reads page columns after the 512th as the 512th", "a table in shared memory",
           patch=on_batch(_table_of_512, "attend"), **READS_NO_TABLE),
    Mutant("T09", "Uses the previous request's mask for more than 8 requests with more than 32 slots",
           "two conditions",
           patch=on_batch(_mask_of_the_last)),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("OK1", "OK2", "OK3", "OK4", "OK5"), "production.profiles_are_right_together"),
    **dict.fromkeys(("R27", "S10", "T09"), "production.wide_tails_are_right"),
    "S13": "production.every_head_shape_is_right",
    "T07": "production.every_page_column_is_read",
}
