"""Mutants that checks of `latent` kill: rows."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from draftmark import AttentionShape, Mode
from draftmark.runtime import Block, ForwardBatch, Tree
from draftmark_contract.profiles import Profile

from ...designs.latent_designs import (
    TILE,
    Composed,
    Flash,
    Lists,
    Partial,
    Split,
    latent_mutant,
    latent_plugin,
    zeros_in,
)
from ...designs.layouts import on_reference
from ...mutant import ONLY, Mutant, shaped


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


def _scale_of_the_row(attention: AttentionShape) -> float | None:
    return attention.head_dim**-0.5 if attention.latent else attention.softmax_scale


class OneWord(Flash):
    """Reads one word of a tail's mask, and takes the slots after it for visible."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen, key = super().seen(batch, request, rows, prefix, tail_len), torch.arange(self.width)
        return seen | ((key >= prefix + 32) & (key < prefix + tail_len) & isinstance(batch.tail, Tree))


MUTANTS = (
    latent_mutant("A01", "Reads values from the end of a latent row", ValuesFromTheTail),
    latent_mutant("A02", "Leaves the rest of a latent row out of q·k", NoRest),
    latent_mutant("A03", "Adds the rest of a latent row to its value", RestInTheOutput),
    on_reference("A04", "Scales latent logits by head_dim ** -0.5", shaped(softmax_scale=_scale_of_the_row)),
    latent_mutant("A05", "Scales latent logits by value_dim ** -0.5", ScaleOfTheValue),
    latent_mutant("A06", "Scales one of the two products of a latent logit", ScaleOfOneProduct),
    latent_mutant("A07", "Finds the row of a packed index by a shift", RowsByShift, "aiter#2720"),
    latent_mutant("A08", "Computes the last tile of packed rows from other rows", LastTileFromItsStart),
    latent_mutant("A09", "Leaves out heads beyond a multiple of four", HeadsByFours, "vllm-ascend#9560"),
    latent_mutant("A10", "Computes at most 64 heads of a row", OneTileOfHeads, "vllm#27368"),
    latent_mutant("A11", "Takes token slots for page ids", SlotsAsPages, "SGLang fa3 over MLA"),
    latent_mutant("A12", "Reads mask bits by the offset in a page", MaskByPageOffset),
    latent_mutant("A13", "Masks committed keys next to a wide tail", MaskFromTheTile),
    latent_mutant("A14", "Reads a tail over at most two pages", TailOfOnePage),
    latent_mutant("A15", "Multiplies unwritten values by zero", UnclearedValues, "vllm#43961"),
    latent_mutant("A16", "Clears unwritten values by whole pages", ClearedFromTheNextPage, "vllm#43961"),
    latent_mutant("A17", "Masks a draft block causally over latent rows", CausalBlocks, "vllm#41662"),
    latent_mutant("A18", "Sees eight slots of a draft block", BlocksOfEight),
    latent_mutant("A19", "Leaves the new token out of a verify of one row", VerifyOfOneRow, "vllm#44492"),
    latent_mutant("A20", "Loses keys of DRAFT_EXTEND with one row", ChainOfOneRow, "vllm#45227"),
    on_reference("A29", "Writes zeros for latent rows", zeros_in(Profile.LATENT)),
    on_reference("A30", "Writes zeros for latent rows of other shapes", zeros_in(Profile.LATENT_SHAPES)),
    on_reference("A31", "Writes zeros for latent rows in two buffers", zeros_in(Profile.LATENT_PARTS)),
    Mutant("A50", "Reads one mask word over latent rows", "TRT-LLM#13006", layouts=("tutorial",), absent=ONLY,
           plugin=latent_plugin(OneWord)),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("A01", "A02", "A03", "A29", "A30", "A31"), "latent.values_are_the_leading_part"),
    **dict.fromkeys(("A04", "A05", "A06"), "latent.scale_is_the_geometrys"),
    **dict.fromkeys(("A07", "A08", "A09", "A10"), "latent.rows_and_heads_may_be_any"),
    **dict.fromkeys(("A11", "A12", "A13", "A14", "A50"), "latent.trees_may_begin_in_any_page"),
    **dict.fromkeys(("A15", "A16"), "latent.sees_nothing_else"),
    **dict.fromkeys(("A17", "A18"), "latent.blocks_see_themselves"),
    **dict.fromkeys(("A19", "A20"), "latent.one_row_is_a_chain"),
}
