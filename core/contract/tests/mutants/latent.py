"""Mutants A01 … A32: latent rows in correct kernels of several designs. `latent_metadata` has those of other parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from draftmark import AttentionShape, Mode
from draftmark.batch import Block, ForwardBatch
from draftmark.cache import KVCache
from draftmark_contract.profiles import Profile, profiles_of

from . import latent_metadata
from .latent_designs import TILE, Composed, Flash, Latent, Lists, Partial, Split, latent_plugin
from .mutant import ONLY, Mutant, after, around, shaped

Tensor = torch.Tensor
IN_ONE_DESIGN = "one design is enough"


# -- keys, values and scale -----------------------------------------------------------------------------------


class ValuesFromTheTail(Flash):
    """Reads values from the last value_dim elements of a row."""

    def values(self, keys: Tensor) -> Tensor:
        return keys[:, -self.value_dim :]


class NoRest(Split):
    """Leaves the rest of a row out of q·k."""

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        return super().scores(q[:, : self.value_dim], keys[:, : self.value_dim])


class RestInTheOutput(Composed):
    """Adds the rest of a row to the first elements of its value."""

    def values(self, keys: Tensor) -> Tensor:
        found, rest = super().values(keys).clone(), keys[:, self.value_dim :]
        width = min(rest.shape[1], self.value_dim)
        found[:, :width] += rest[:, :width]
        return found


class ScaleOfTheValue(Lists):
    """Scales logits by value_dim ** -0.5."""

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        return q @ keys.T * self.value_dim**-0.5


class ScaleOfOneProduct(Composed):
    """Scales the product of the value parts only, and not the product of the rests."""

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        cut = self.value_dim
        return super().scores(q[:, :cut], keys[:, :cut]) + q[:, cut:] @ keys[:, cut:].T


# -- rows, heads and tiles ------------------------------------------------------------------------------------


class RowsByShift(Flash):
    """Finds the row of a packed index by a shift with the logarithm of the head count, rounded up."""

    def by_head(self, seen: Tensor) -> Tensor:
        heads = self.shape.num_qo_heads
        index = torch.arange(len(seen) * heads) >> math.ceil(math.log2(heads))
        return seen[index.clamp(max=len(seen) - 1)]


class LastTileFromItsStart(Flash):
    """Computes the last tile of packed rows from the rows of a whole tile before the end."""

    def row_tile(self, q: Tensor, keys: Tensor, seen: Tensor, first: int) -> Partial:
        if first and first + TILE > len(q):
            out, lse = super().row_tile(q, keys, seen, len(q) - TILE)
            return out[: len(q) - first], lse[: len(q) - first]
        return super().row_tile(q, keys, seen, first)


class HeadsByFours(Split):
    """Computes heads in groups of four, and leaves the last group out if it is not full."""

    def packed(self, q: Tensor, keys: Tensor, seen: Tensor, prefix: Tensor) -> Partial:
        out, lse = super().packed(q, keys, seen, prefix)
        heads = self.shape.num_qo_heads
        full = torch.arange(len(out)) % heads < heads // 4 * 4
        return (out * full[:, None], lse) if heads > 4 else (out, lse)


class OneTileOfHeads(Lists):
    """Computes at most 64 heads of a row."""

    def request(self, *args: Any) -> Partial:
        out, lse = super().request(*args)
        kept = torch.arange(len(out)) % self.shape.num_qo_heads < 64
        return out * kept[:, None], lse


# -- masks and pages ------------------------------------------------------------------------------------------


class SlotsAsPages(Lists):
    """Looks up a token slot as a page id, as a table of slots does with a cache viewed in pages."""

    def slots_of(self, table: Tensor) -> Tensor:
        size, slots = self.shape.page_size, super().slots_of(table)
        place = torch.arange(len(slots))
        return slots[place // size] % (table.max() + 1) * size + place % size


class MaskByPageOffset(Flash):
    """Reads the mask bit of a tail slot from the slot's offset in its page."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen = super().seen(batch, request, rows, prefix, tail_len)
        slot = torch.arange(tail_len)
        other = (prefix + slot) % self.shape.page_size
        source = prefix + torch.where(other < tail_len, other, slot)
        seen[:, prefix + slot] = seen[:, source]
        return seen


class MaskFromTheTile(Flash):
    """Masks the committed keys of the tile in which the tail begins with the bits of the first tail slot."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen = super().seen(batch, request, rows, prefix, tail_len)
        start = prefix // 16 * 16
        key = torch.arange(self.width)
        shared = (key >= start) & (key < prefix)
        return seen & ~(shared & (batch.mode is Mode.VERIFY) & (tail_len > 32))


class TailOfOnePage(Composed):
    """Reads the tail from the page in which it begins only."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        size = self.shape.page_size
        seen, end = super().seen(batch, request, rows, prefix, tail_len), (prefix // size + 2) * size
        return seen & (torch.arange(self.width) < end)


class UnclearedValues(Flash):
    """Multiplies values that were never written by a weight of zero."""

    def cleared(self, rows: Tensor, used: Tensor) -> Tensor:
        found = super().cleared(rows, used)
        found[:, : self.value_dim] = rows[:, : self.value_dim]
        return found

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        return super().scores(q, keys.nan_to_num(0.0, 0.0, 0.0))


class ClearedFromTheNextPage(Split):
    """Clears unwritten values from the page after the last one on."""

    def cleared(self, rows: Tensor, used: Tensor) -> Tensor:
        size = self.shape.page_size
        whole = used.view(-1, size).any(1).repeat_interleave(size)[:, None]
        return super().cleared(rows, whole)

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        return super().scores(q, keys.nan_to_num(0.0, 0.0, 0.0))


class CausalBlocks(Composed):
    """Masks a draft block causally."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        return self._visible(batch, request, rows, prefix, tail_len)


class BlocksOfEight(Flash):
    """Sees at most eight slots of a draft block."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen = super().seen(batch, request, rows, prefix, tail_len)
        short = torch.arange(self.width) < prefix + 8
        return seen & short if isinstance(batch.tail, Block) else seen


# -- one row, padding, strides --------------------------------------------------------------------------------


class VerifyOfOneRow(Lists):
    """Leaves the row itself out where a verify has one row, as the schedule of a decode without its new token."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen = super().seen(batch, request, rows, prefix, tail_len)
        one = batch.mode is Mode.VERIFY and rows.stop - rows.start == 1
        own = torch.arange(self.width) == prefix
        return seen & ~(own & (prefix > 0)) if one else seen


class ChainOfOneRow(Split):
    """Plans one share fewer for DRAFT_EXTEND of one row than it reads, so that the last keys are lost."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen = super().seen(batch, request, rows, prefix, tail_len)
        one = batch.mode is Mode.DRAFT_EXTEND and rows.stop - rows.start == 1
        return seen & (torch.arange(self.width) < 512) if one else seen


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


# -- log-sum-exp ----------------------------------------------------------------------------------------------


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


# -- zeros in one profile -------------------------------------------------------------------------------------


def _zeros_in(profile: Profile) -> Callable[[Any], None]:
    """Return a patch that writes zeros for every geometry of a profile."""

    def patch(backend: Any) -> None:
        if profile in profiles_of(backend.geometry):
            after(backend, "attend", lambda q, cache, batch, out, *lse: out.zero_())

    return patch


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


def _scale_of_the_row(attention: AttentionShape) -> float | None:
    return attention.head_dim**-0.5 if attention.latent else attention.softmax_scale


def _design(name: str, what: str, backend: type[Latent], source: str = "") -> Mutant:
    return Mutant(name, what, source, layouts=("tutorial",), absent=ONLY, plugin=latent_plugin(backend))


def _reference(name: str, what: str, patch: Callable[[Any], None], source: str = "") -> Mutant:
    return Mutant(name, what, source, patch=patch, layouts=("reference",), absent=IN_ONE_DESIGN)


OF_KERNELS = (
    _design("A01", "Reads values from the end of a latent row", ValuesFromTheTail),
    _design("A02", "Leaves the rest of a latent row out of q·k", NoRest),
    _design("A03", "Adds the rest of a latent row to its value", RestInTheOutput),
    _reference("A04", "Scales latent logits by head_dim ** -0.5", shaped(softmax_scale=_scale_of_the_row)),
    _design("A05", "Scales latent logits by value_dim ** -0.5", ScaleOfTheValue),
    _design("A06", "Scales one of the two products of a latent logit", ScaleOfOneProduct),
    _design("A07", "Finds the row of a packed index by a shift", RowsByShift, "aiter#2720"),
    _design("A08", "Computes the last tile of packed rows from other rows", LastTileFromItsStart),
    _design("A09", "Leaves out heads beyond a multiple of four", HeadsByFours, "vllm-ascend#9560"),
    _design("A10", "Computes at most 64 heads of a row", OneTileOfHeads, "vllm#27368"),
    _design("A11", "Takes token slots for page ids", SlotsAsPages, "SGLang fa3 over MLA"),
    _design("A12", "Reads mask bits by the offset in a page", MaskByPageOffset),
    _design("A13", "Masks committed keys next to a wide tail", MaskFromTheTile),
    _design("A14", "Reads a tail over at most two pages", TailOfOnePage),
    _design("A15", "Multiplies unwritten values by zero", UnclearedValues, "vllm#43961"),
    _design("A16", "Clears unwritten values by whole pages", ClearedFromTheNextPage, "vllm#43961"),
    _design("A17", "Masks a draft block causally over latent rows", CausalBlocks, "vllm#41662"),
    _design("A18", "Sees eight slots of a draft block", BlocksOfEight),
    _design("A19", "Leaves the new token out of a verify of one row", VerifyOfOneRow, "vllm#44492"),
    _design("A20", "Loses keys of DRAFT_EXTEND with one row", ChainOfOneRow, "vllm#45227"),
    _design("A21", "Takes an empty prefix for one of a token", AtLeastOneToken, "vllm#35969"),
    _design("A22", "Computes the first 16 requests of a batch", SixteenRequests, "vllm-ascend#2951"),
    _design("A23", "Reads queries as contiguous", PackedQueries, "flashinfer#1341"),
    _design("A24", "Stores new rows as contiguous", PackedRows, "flashinfer#1341"),
    _design("A25", "Returns a log-sum-exp to base 2", BaseTwo),
    _design("A26", "Returns the log-sum-exp of one share", OfTheLastShare),
    _design("A27", "Returns the log-sum-exp of unscaled logits", OfUnscaledLogits),
    _reference("A28", "Wraps slot · head_dim at 2**31", _wrapped, "vllm#47671"),
    _reference("A29", "Writes zeros for latent rows", _zeros_in(Profile.LATENT)),
    _reference("A30", "Writes zeros for latent rows of other shapes", _zeros_in(Profile.LATENT_SHAPES)),
    _reference("A31", "Writes zeros for latent rows in two buffers", _zeros_in(Profile.LATENT_PARTS)),
    _reference("A32", "Writes zeros for narrow values", _zeros_in(Profile.NARROW_VALUES)),
)
MUTANTS = (*OF_KERNELS, *latent_metadata.MUTANTS)

KILLER = {
    **dict.fromkeys(("A01", "A02", "A03", "A29", "A30", "A31"), "latent.values_are_the_leading_part"),
    **dict.fromkeys(("A04", "A05", "A06"), "latent.scale_is_the_geometrys"),
    **dict.fromkeys(("A07", "A08", "A09", "A10"), "latent.rows_and_heads_may_be_any"),
    **dict.fromkeys(("A11", "A12", "A13", "A14"), "latent.trees_may_begin_in_any_page"),
    **dict.fromkeys(("A15", "A16"), "latent.sees_nothing_else"),
    **dict.fromkeys(("A17", "A18"), "latent.blocks_see_themselves"),
    **dict.fromkeys(("A19", "A20"), "latent.one_row_is_a_chain"),
    **dict.fromkeys(("A21", "A22"), "latent.padding_may_be_most"),
    **dict.fromkeys(("A23", "A24"), "latent.queries_may_be_strided"),
    **dict.fromkeys(("A25", "A26", "A27"), "latent_lse.is_natural"),
    "A28": "latent.rows_may_lie_past_int32",
    "A32": "narrow_values.match_float64",
    **latent_metadata.KILLER,
}
"""Check that must kill each mutant."""
