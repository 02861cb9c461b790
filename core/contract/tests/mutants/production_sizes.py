"""Mutants F01 … F06 and F11 … F17: right at the sizes at which a feature was first tested, wrong at others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Form, Mode
from draftmark.batch import Causal, ForwardBatch
from draftmark.cache import KVCache
from draftmark_contract.profiles import FP8_DTYPE

from .attention_parts import Parts as TutorialParts
from .attention_parts import plugin
from .mutant import ONLY, Mutant, around, on_batch
from .plain_attention import Parts, attending, right_cap

Tensor = torch.Tensor
CSR, REFERENCE = ("csr",), ("reference",)
IN_ONE_DESIGN = "one design is enough: the other is the same code in this helper"


# -- features at production size ------------------------------------------------------------------------------


def _scaled_for(keys: int) -> Callable[[Any], None]:
    """Return a patch that applies the scale of fp8 values only to the first `keys` keys of a request."""

    def patch(backend: Any) -> None:
        if backend.geometry.attention.kv_dtype != FP8_DTYPE:
            return

        def values(weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
            part = torch.cat((v[:, :keys], v[:, keys:] / 2), 1)
            return torch.einsum("rhqk,rkhd->rqhd", weights, part)

        attending(Parts(values=values))(backend)

    return patch


def _capped_for(requests: int) -> Parts:
    """Return attention that applies the soft cap only to the first `requests` requests of a batch."""
    return Parts(cap=lambda scores, cap: torch.cat((right_cap(scores[:requests], cap), scores[requests:])))


def _clamps(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Clamp lengths that exceed the context limit, in batches of more than 16 requests."""
    limits = backend.geometry.limits
    if not limits.overshoots or batch.padded_reqs <= 16:
        return batch
    return replace(batch, prefix_lens=batch.prefix_lens.clamp(max=limits.max_context_len))


def _causal_past(keys: int, mode: Mode) -> Callable[[Any, ForwardBatch], ForwardBatch]:
    """Return a change of the batch: a causal tail in place of a tree or block if a request may have more keys."""

    def change(backend: Any, batch: ForwardBatch) -> ForwardBatch:
        long = batch.mode is mode and max(batch.host.upper_bound(), default=0) > keys
        return replace(batch, tail=Causal()) if long else batch

    return change


def _swaps_strided(backend: Any) -> None:
    """Read the halves of a strided page in the wrong order, for pages of 32 and 64 tokens."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        size = backend.geometry.attention.page_size
        if Form.STRIDED_KV in backend.geometry.forms and size in (32, 64):
            cache = replace(cache, v=cache.v.roll(size // 2, 1))
        original(q, cache, batch, out)

    around(backend, "attend", call)


class OneWordWhenLong(TutorialParts):
    """Reads one mask word for requests with more than 512 committed tokens."""

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        seen = super().tree_bits(words, slot, depth, prefix)
        return seen & (slot < 32) if int(prefix) > 512 else seen


# -- sizes as a space -----------------------------------------------------------------------------------------


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


def _repeats_rows(backend: Any) -> None:
    """Write rows from the 8,193rd on from the rows before them, as a grid of limited size does."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        original(q, cache, batch, out)
        out[2**13 :] = out[: max(0, out.shape[0] - 2**13)].clone()

    around(backend, "attend", call)


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


def _mutant(name: str, what: str, layouts: tuple[str, ...], patch: Callable[[Any], None], source: str = "") -> Mutant:
    return Mutant(name, what, source, patch=patch, layouts=layouts, absent=IN_ONE_DESIGN)


def _tutorial(name: str, what: str, backend: type[TutorialParts]) -> Mutant:
    return Mutant(name, what, "", layouts=("tutorial",), absent=ONLY, plugin=plugin(backend))


MUTANTS = (
    _mutant("F11", "Scales fp8 values only up to the 1,024th key", CSR, _scaled_for(1024), "flashinfer#3864"),
    _mutant("F12", "Applies the soft cap only to the first eight requests", CSR, attending(_capped_for(8))),
    _mutant("F13", "Clamps overshot lengths in batches of more than 16 requests", CSR, on_batch(_clamps)),
    _tutorial("F14", "Reads one mask word after more than 512 committed tokens", OneWordWhenLong),
    _mutant("F15", "Makes a draft block causal after more than 1,024 committed tokens", REFERENCE,
            on_batch(_causal_past(1024, Mode.DRAFT_BLOCK)), "vllm#54374"),
    _mutant("F16", "Makes a ragged verify causal after more than 512 committed tokens", REFERENCE,
            on_batch(_causal_past(512, Mode.RAGGED_VERIFY)), "flashinfer#4382"),
    _mutant("F17", "Exchanges the halves of strided pages of 32 and 64 tokens", REFERENCE, _swaps_strided),
    _mutant("F01", "Drops a committed key of requests with a multiple of 272 keys", CSR, attending(_last_key_at(272))),
    _mutant("F02", "Drops keys from the 65,537th on", REFERENCE, attending(Parts(seen=_past_16_bits)), "vllm#47671"),
    _mutant("F03", "Repeats output rows after the 8,192nd", CSR, _repeats_rows),
    _tutorial("F04", "Reads the page table of request n - 64 from the 65th request on", SixtyFourTables),
    _tutorial("F05", "Drops the first key of requests with 613 committed tokens", OneLength),
    _tutorial("F06", "Leaves 16 dimensions of q and k out at head_dim 112, 160, 208 and 224", ShortOddHeads),
)  # fmt: skip

KILLER = {
    **dict.fromkeys(("F11", "F12", "F13", "F14", "F15", "F16", "F17"), "production.a_crowd_is_right"),
    "F01": "sizes.may_end_at_any_tile",
    **dict.fromkeys(("F02", "F04"), "sizes.may_pass_small_integers"),
    "F03": "production.many_rows_are_right",
    "F05": "sizes.may_be_every_length",
    "F06": "sizes.may_be_any",
}
"""Check that must kill each mutant."""
