"""Mutants that the checks of `sizes` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import AttentionShape, Mode
from draftmark.runtime import ForwardBatch, KVCache

from ..designs.changes import clears_slots
from ..designs.layouts import CSR, REFERENCE, in_layouts
from ..designs.plain_attention import Parts, attending
from ..designs.tutorial_parts import TutorialParts, with_parts
from ..designs.tutorial_plans import Mapped, plugin
from ..mutant import ONLY, Mutant, around

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
        if not batch.uniform:
            return super().request_of(batch)
        rows = torch.arange(batch.num_rows, dtype=torch.float32, device=batch.device)
        share = torch.tensor(1.0, dtype=torch.float32) / batch.q_lens[0]
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
    clears_slots(backend)


def _columns_in_powers(backend: Any) -> None:
    """Store output columns in blocks of 64 and one block of a power of two for the rest: 112 has 48 columns left."""

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        original(q, cache, batch, out)
        whole, rest = out.shape[2] // 64 * 64, out.shape[2] % 64
        if whole and rest:
            out[:, :, whole + (1 << (rest.bit_length() - 1)) :] = 0

    around(backend, "attend", attend)


def _last_key_at(multiple: int) -> Parts:
    """Return attention that drops a request's last committed key at multiples of this number of keys, past 256."""

    def seen(visible: Tensor, prefix: Tensor, shape: Any) -> Tensor:
        keys = visible.any(1).flip(-1).int().argmax(-1).neg() + visible.shape[-1]
        drops = (keys % multiple == 0) & (keys > 256)
        key = torch.arange(visible.shape[-1])
        return visible & ~(drops[:, None] & (key == prefix[:, None] - 1))[:, None]

    return Parts(seen=seen)


def _past_16_bits(visible: Tensor, prefix: Tensor, shape: Any) -> Tensor:
    return visible & (torch.arange(visible.shape[-1]) < 2**16)


class SixtyFourTables(TutorialParts):
    """Reads the page table of request n - 64 from the 65th request on."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        table = batch.page_table[torch.arange(batch.padded_reqs) % 64]
        super().attend(q, cache, replace(batch, page_table=table), out)


class OneLength(TutorialParts):
    """Drops the first key of requests with exactly 613 committed tokens."""

    def _visible(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen = super()._visible(batch, request, rows, prefix, tail_len)
        seen[:, 0] &= int(prefix) != 613
        return seen


class ShortOddHeads(TutorialParts):
    """Leaves the last 16 dimensions of q and k out at head_dim 112, 160, 208 and 224."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        odd = q.shape[-1] in (112, 160, 208, 224)
        return super().scores(q[..., :-16], k[..., :-16]) if odd else super().scores(q, k)


MUTANTS = (
    in_layouts("F01", "Drops a committed key of requests with a multiple of 272 keys", CSR,
               attending(_last_key_at(272))),
    in_layouts("F02", "Drops keys from the 65,537th on", REFERENCE, attending(Parts(seen=_past_16_bits)), "vllm#47671"),
    with_parts("F04", "Reads the page table of request n - 64 from the 65th request on", SixtyFourTables),
    with_parts("F05", "Drops the first key of requests with 613 committed tokens", OneLength),
    with_parts("F06", "Leaves 16 dimensions of q and k out at head_dim 112, 160, 208 and 224", ShortOddHeads),
    Mutant("OF1", f"Skips a last tile of exactly {TILE} keys", "a remainder of zero",
           patch=attending(Parts(seen=_full_last_tile)), layouts=("csr",), absent="tried in csr"),
    Mutant("OF2", "Divides row numbers by a rounded reciprocal", "a fast division that rounds down",
           plugin=plugin(ByReciprocal), layouts=("tutorial",), absent=ONLY),
    Mutant("OF3", "Shares plans between batches of more than 64 requests", "a cache keyed on a bucket",
           patch=_bucketed_plans, layouts=("cuda_triton",), absent="a cache of cuda_triton's host code"),
    Mutant("OF4", "Stores the columns after a multiple of 64 as one power of two", "head_dim 112",
           patch=_columns_in_powers, layouts=("reference",), absent="tried in reference"),
)  # fmt: skip
KILLER = {
    "F01": "sizes.may_end_at_any_tile",
    **dict.fromkeys(("F02", "F04", "OF3"), "sizes.may_pass_small_integers"),
    **dict.fromkeys(("F05", "OF1"), "sizes.may_be_every_length"),
    **dict.fromkeys(("F06", "OF4"), "sizes.may_be_any"),
    "OF2": "sizes.may_be_any_number_of_rows",
}
