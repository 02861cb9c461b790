"""Mutants that checks of `latent`, `latent_graphs`, `latent_lse`, `narrow_values` kill: steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Form, Geometry, Mode
from draftmark.runtime import ForwardBatch, KVCache, Unknown
from draftmark_contract.profiles import Profile, profiles_of

from ...designs.latent_designs import (
    Composed,
    Flash,
    Lists,
    Partial,
    Split,
    is_latent,
    latent_mutant,
    latent_plugin,
    refuses,
    with_hooks,
    zeros_in,
)
from ...designs.layouts import on_reference
from ...mutant import ONLY, Mutant, after, around, on_batch, shaped


class AtLeastOneToken(Flash):
    """Takes a prefix of no token for one of a token, as a kernel that subtracts one from the length does."""

    def length(self, batch: ForwardBatch, request: int) -> Tensor:
        return super().length(batch, request).clamp(min=1)


class SixteenRequests(Composed):
    """Computes the first 16 requests of a batch, and leaves the output of the others as it is."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, lse: Tensor | None = None) -> None:
        kept = out[16 * batch.q_lens[0] :].clone()
        super().attend(q, cache, batch, out, lse)
        if batch.mode is not Mode.EXTEND:
            out[16 * batch.q_lens[0] :] = kept


class PackedQueries(Split):
    """Reads queries as if rows and heads were contiguous."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, lse: Tensor | None = None) -> None:
        _, heads, dim = q.shape
        packed = torch.as_strided(q, q.shape, (heads * dim, dim, 1))
        super().attend(packed, cache, batch, out, lse)


class PackedRows(Flash):
    """Stores new rows as if they were contiguous."""

    def write_kv(self, k: Tensor, v: Tensor | None, cache: KVCache, batch: ForwardBatch) -> None:
        packed = torch.as_strided(k, k.shape, (k.shape[2], k.shape[2], 1))
        super().write_kv(packed, v, cache, batch)


class BaseTwo(Flash):
    """Returns a log-sum-exp to base 2."""

    def row_tile(self, q: Tensor, keys: Tensor, seen: Tensor, first: int) -> Partial:
        out, lse = super().row_tile(q, keys, seen, first)
        return out, lse / math.log(2)


class OfTheLastShare(Split):
    """Returns the log-sum-exp of the first share of the keys."""

    def combined(self, parts: list[Partial]) -> Partial:
        return super().combined(parts)[0], parts[0][1]


class OfUnscaledLogits(Lists):
    """Returns the log-sum-exp of logits without their scale."""

    def partial(self, q: Tensor, keys: Tensor, seen: Tensor) -> Partial:
        logits = (q @ keys.T).masked_fill(~seen, float("-inf"))
        return super().partial(q, keys, seen)[0], logits.logsumexp(-1)


def _wrapped(backend: Any) -> None:
    """Wrap slot · head_dim of latent rows at 2**31 when rows are read."""

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Tensor) -> None:
        a = backend.geometry.attention
        if a.latent:
            stride = a.page_size * a.head_dim
            offset = (batch.page_table.long() * stride).to(torch.int32)
            batch.page_table.copy_((offset.clamp(min=0) // stride).to(torch.int32))
        original(q, cache, batch, out, *lse)

    around(backend, "attend", attend)


_opened: dict[str, Geometry] = {}
"""Latent geometry that a mutant of pairs opened last."""


def _only_plain_latent(field: str, value: object) -> Callable[[Any], None]:
    """Return a patch that drops a field of the attention shape of latent layers."""
    return lambda backend: shaped(**{field: value})(backend) if backend.geometry.attention.latent else None


def _width_of_the_dummy(backend: Any) -> None:
    """Plan at capture for at most two pages, as the dummy batch has."""

    def plan(batch: ForwardBatch) -> None:
        if backend.geometry.attention.latent and isinstance(batch.host, Unknown):
            backend._widths = tuple(min(n, 2) for n in backend._widths)

    after(backend, "plan", plan)


def _stale_slots(backend: Any) -> None:
    """Leave the slots of padded requests as an earlier batch wrote them."""

    def call(original: Any, batch: ForwardBatch) -> None:
        before = backend._slots.clone()
        original(batch)
        if backend.geometry.attention.latent and batch.uniform:
            live = batch.num_reqs * batch.q_lens[0]
            backend._slots[live : batch.num_rows] = before[live : batch.num_rows]

    around(backend, "write_metadata", call)


def _stores_anyway(backend: Any) -> None:
    """Store zeros at the slots of the rows although the engine has stored them."""

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Tensor) -> None:
        original(q, cache, batch, out, *lse)
        if Form.ENGINE_STORES in backend.geometry.forms:
            backend.write_kv(q.new_zeros(len(q), 1, q.shape[2]), None, cache, batch)

    around(backend, "attend", attend)


def _without_the_tail(backend: Any) -> None:
    """Take the tail for unwritten, because no write_kv has stored it."""

    def metadata(batch: ForwardBatch) -> None:
        if Form.ENGINE_STORES in backend.geometry.forms:
            backend._kv_lens[: batch.padded_reqs] = batch.prefix_lens

    after(backend, "write_metadata", metadata)


def _after_a_latent_layer(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a patch of layers with K and V apart that are opened after a latent layer."""

    def patch(backend: Any) -> None:
        geometry = backend.geometry
        if geometry.attention.latent:
            _opened["last"] = geometry
        elif _opened and geometry.limits == _opened["last"].limits:
            change(backend)

    return patch


def _in_kernel_pages(backend: Any) -> None:
    """Read a draft's page ids as those of pages of half the size."""

    def halved(owner: Any, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, page_table=batch.page_table // 2)

    on_batch(halved, "attend")(backend)


def _without_metadata(backend: Any) -> None:
    """Use the metadata of the target's layers for a draft's."""
    backend.write_metadata = lambda batch: None


def _zeros_with(profile: Profile) -> Callable[[Any], None]:
    """Return a patch that writes zeros for latent rows together with another profile."""

    def patch(backend: Any) -> None:
        needs = profiles_of(backend.geometry)
        if backend.geometry.attention.latent and profile in needs:
            after(backend, "attend", lambda q, cache, batch, out, *lse: out.zero_())

    return patch


class OneThousandKeys(Split):
    """Loses keys from the 1,537th on in batches of more than 16 requests."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen = super().seen(batch, request, rows, prefix, tail_len)
        lost = (torch.arange(self.width) >= 1536) & (torch.arange(self.width) < prefix)
        return seen & ~lost if batch.padded_reqs > 16 else seen


def _narrow_scale(attention: Any) -> float | None:
    apart = not attention.latent and attention.value_width != attention.head_dim
    return attention.value_width**-0.5 if apart else attention.softmax_scale


MUTANTS = (
    latent_mutant("A21", "Takes an empty prefix for one of a token", AtLeastOneToken, "vllm#35969"),
    latent_mutant("A22", "Computes the first 16 requests of a batch", SixteenRequests, "vllm-ascend#2951"),
    latent_mutant("A23", "Reads queries as contiguous", PackedQueries, "flashinfer#1341"),
    latent_mutant("A24", "Stores new rows as contiguous", PackedRows, "flashinfer#1341"),
    latent_mutant("A25", "Returns a log-sum-exp to base 2", BaseTwo),
    latent_mutant("A26", "Returns the log-sum-exp of one share", OfTheLastShare),
    latent_mutant("A27", "Returns the log-sum-exp of unscaled logits", OfUnscaledLogits),
    on_reference("A28", "Wraps slot · head_dim at 2**31", _wrapped, "vllm#47671"),
    on_reference("A32", "Writes zeros for narrow values", zeros_in(Profile.NARROW_VALUES)),
    on_reference("A40", "Accepts a window of latent rows and drops it", _only_plain_latent("window_left", -1)),
    on_reference("A41", "Accepts a soft cap of latent rows and drops it", _only_plain_latent("logits_soft_cap", 0.0)),
    with_hooks("A42", "Refuses latent rows with sinks without naming them",
               refuses(lambda g: is_latent(g) and g.attention.sinks, "this geometry is not served here")),
    on_reference("A43", "Freezes the width of the batch at capture", _width_of_the_dummy, "vllm#51119"),
    on_reference("A44", "Keeps stale slots of padded requests", _stale_slots, "vllm#36611"),
    on_reference("A45", "Stores rows that the engine has stored", _stores_anyway),
    on_reference("A46", "Takes rows that the engine stored for unwritten", _without_the_tail),
    on_reference("A47", "Reads a draft's pages in the target's kernel pages", _after_a_latent_layer(_in_kernel_pages),
                 "tokenspeed#958"),
    on_reference("A48", "Uses the metadata of a latent target for its draft", _after_a_latent_layer(_without_metadata),
                 "sglang#23490"),
    on_reference("A49", "Writes zeros for latent rows under overlap", _zeros_with(Profile.OVERLAP)),
    Mutant("A51", "Loses keys from the 1,537th on in crowds", "flashinfer#5170", layouts=("tutorial",), absent=ONLY,
           plugin=latent_plugin(OneThousandKeys)),
    on_reference("A52", "Scales the logits of narrow values by value_dim ** -0.5", shaped(softmax_scale=_narrow_scale)),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("A21", "A22"), "latent.padding_may_be_most"),
    **dict.fromkeys(("A23", "A24"), "latent.queries_may_be_strided"),
    **dict.fromkeys(("A25", "A26", "A27"), "latent_lse.is_natural"),
    "A28": "latent.rows_may_lie_past_int32",
    **dict.fromkeys(("A32", "A52"), "narrow_values.match_float64"),
    **dict.fromkeys(("A40", "A41", "A42"), "latent.features_are_served_or_refused"),
    **dict.fromkeys(("A43", "A44"), "latent_graphs.replay_other_rows"),
    **dict.fromkeys(("A45", "A46"), "latent.engine_may_store"),
    **dict.fromkeys(("A47", "A48"), "latent.pairs_share_their_pages"),
    "A49": "latent.profiles_are_right_together",
    "A51": "latent.a_crowd_is_right",
}
