"""Mutants OF… and OK…, by an author who had not read the checks: sizes as a space, and features at production size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import AttentionShape, Mode
from draftmark.batch import ForwardBatch

from .mutant import ONLY, Mutant, around, shaped
from .plain_attention import Parts, attending
from .state_and_order import Mapped, plugin

# -- QF: sizes as a space ---------------------------------------------------------------------------------------------

TILE = 176
"""Keys of a tile; FlashAttention-3 has tiles of 128 x 176 for head_dim 128."""


def _full_last_tile(seen: torch.Tensor, prefix: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Take a last tile of exactly 176 keys for an empty one: its length is the remainder of the division."""
    key = torch.arange(seen.shape[2])
    length = torch.where(seen.any(1), key + 1, 0).amax(1)
    dropped = (length % TILE == 0) & (length > TILE)
    return seen & ~(dropped[:, None] & (key >= (length - TILE)[:, None]))[:, None]


class ByReciprocal(Mapped):
    """Finds a row's request by a float32 product with 1 / q_len, which rounds down at 41, 47, 55, 61, … rows."""

    def request_of(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the request of each row."""
        if batch.uniform is None:
            return super().request_of(batch)
        rows = torch.arange(batch.num_rows, dtype=torch.float32, device=batch.device)
        share = torch.tensor(1.0, dtype=torch.float32) / batch.uniform.q_len
        return (rows * share.to(batch.device)).int()


def _bucketed_plans(backend: Any) -> None:
    """Share one plan between batch sizes of a bucket: exact up to 64 requests, then buckets of eight."""
    verify, plans = backend._decode_verify, {}

    def plan_of(original: Any, batch: ForwardBatch) -> Any:
        if batch.padded_reqs <= 64 or batch.mode is Mode.RAGGED_VERIFY:
            return original(batch)
        size = -(-batch.padded_reqs // 8), batch.q_lens[0], batch.tail_lens[0]
        if size not in plans:
            plans[size] = original(batch)
        return plans[size]

    around(verify, "_plan_of", plan_of)
    _clears_slots(backend)


def _clears_slots(backend: Any) -> None:
    """Clear the slots before each metadata launch, so that a row that the launch misses writes to the null page."""

    def write(original: Any, batch: ForwardBatch) -> None:
        backend._slots[: batch.num_rows].zero_()
        original(batch)

    around(backend, "write_metadata", write)


def _columns_in_powers(backend: Any) -> None:
    """Store output columns in blocks of 64 and one block of a power of two for the rest: 112 has 48 columns left."""

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        original(q, cache, batch, out)
        whole, rest = out.shape[2] // 64 * 64, out.shape[2] % 64
        if whole and rest:
            out[:, :, whole + (1 << (rest.bit_length() - 1)) :] = 0

    around(backend, "attend", attend)


def _distance_in_16_bits(seen: torch.Tensor, prefix: torch.Tensor, shape: AttentionShape) -> torch.Tensor:
    """Keep the distance of a key in 16 bits: from 32,768 tokens on it is negative, so it is inside every window."""
    if shape.window_left < 0:
        return seen
    key = torch.arange(seen.shape[2])
    row = torch.where(seen, key, 0).amax(-1, keepdim=True)
    distance = row - key
    return seen | ((distance > 0) & (distance.to(torch.int16) < 0))


# -- QK: features at production size -----------------------------------------------------------------------------------


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
    _clears_slots(backend)


def _causal_over_e4m3(backend: Any) -> None:
    """Leave the block flag out of launches over e4m3 KV, so that a draft block has a causal tail."""
    verify = backend._decode_verify

    def facts(batch: ForwardBatch) -> Any:
        (plan, block, *pitches), *tail = verify._batch_facts(batch)
        eight_bits = backend.geometry.attention.kv_dtype == "float8_e4m3fn"
        return (plan, block and not eight_bits, *pitches), *tail

    verify._facts = facts


MUTANTS = (
    Mutant("OF1", f"Skips a last tile of exactly {TILE} keys", "a remainder of zero",
           patch=attending(Parts(seen=_full_last_tile)), layouts=("csr",), absent="tried in csr"),
    Mutant("OF2", "Divides row numbers by a rounded reciprocal", "a fast division that rounds down",
           plugin=plugin(ByReciprocal), layouts=("tutorial",), absent=ONLY),
    Mutant("OF3", "Shares plans between batches of more than 64 requests", "a cache keyed on a bucket",
           patch=_bucketed_plans, layouts=("cuda_triton",), absent="a cache of cuda_triton's host code"),
    Mutant("OF4", "Stores the columns after a multiple of 64 as one power of two", "head_dim 112",
           patch=_columns_in_powers, layouts=("reference",), absent="tried in reference"),
    Mutant("OF5", "Keeps distances of keys in 16 bits", "flashinfer#3136",
           patch=attending(Parts(seen=_distance_in_16_bits)), layouts=("csr",), absent="tried in csr"),
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
    Mutant("OK6", "Leaves out the soft cap in groups of eight query heads and more", "Gemma's cap in other groups",
           patch=shaped(logits_soft_cap=lambda a: a.logits_soft_cap if a.group_size < 8 else 0.0),
           layouts=("csr",), absent="tried in csr"),
)  # fmt: skip

KILLER = {
    "OF1": "sizes.may_be_every_length",
    "OF2": "sizes.may_be_any_number_of_rows",
    "OF3": "sizes.may_pass_small_integers",
    "OF4": "sizes.may_be_any",
    "OF5": "purity.steps_read_no_device_memory",
    **dict.fromkeys(("OK1", "OK2", "OK3", "OK4", "OK5"), "production.profiles_are_right_together"),
    "OK6": "production.a_crowd_is_right",
}
"""Check that must kill each mutant."""
