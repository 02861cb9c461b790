"""Mutants that checks of `chosen` kill: lists."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark.runtime import Chosen, ForwardBatch, KVCache
from draftmark_contract.profiles import Profile, profiles_of

from ...designs.chosen_designs import Entries, ListFlash, ListSplit, chosen_mutant, on_lists
from ...designs.latent_designs import Partial
from ...designs.layouts import on_reference
from ...mutant import around


def _entry(slots: Tensor) -> Tensor:
    return torch.arange(slots.shape[1], device=slots.device)


class AfterTheCount(ListFlash):
    """Reads every entry of a list that is a slot of the pool."""

    def entries(self, batch: ForwardBatch, row: int) -> Entries:
        slots, _ = self.list_of(batch, row)
        return slots, (slots >= 0) & (slots <= batch.page_table.max() * self.shape.page_size)


class HolesAreTheLastSlot(ListSplit):
    """Takes -1 for the last slot of the pool, as an index from the end."""

    def entries(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = self.list_of(batch, row)
        return slots, torch.arange(len(slots), device=slots.device) < count

    def rows_at(self, cache: KVCache, slots: Tensor) -> Tensor:
        rows = torch.cat([part.flatten(0, 1) for part in cache.parts], -1)
        return rows[slots % len(rows)].float()


def _ends_at_a_hole(batch: ForwardBatch, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """End a list at its first -1."""
    hole = torch.where(slots == -1, _entry(slots), slots.shape[1]).amin(1).int()
    return slots, torch.minimum(counts, hole)


class ListsByRequest(ListFlash):
    """Gives each row the list with the index of its request."""

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        last = torch.searchsorted(batch.q_indptr, torch.tensor(row, device=batch.device), right=True) - 1
        return super().list_of(batch, last)  # type: ignore[arg-type]


class AtLeastOneEntry(ListSplit):
    """Attends to the first entry of an empty list."""

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        return slots.clamp(0, int(batch.page_table.numel())), count.clamp(min=1)


class FullTiles(ListFlash):
    """Drops the last tile of a list if it is not full, except the first tile."""

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        return slots, torch.where(count > 16, count // 16 * 16, count)


def _one_entry_less(batch: ForwardBatch, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the last entry of a full list."""
    return slots, counts.clamp(max=max(1, slots.shape[1] - 1))


class EmptyRowsSumToZero(ListFlash):
    """Returns the log-sum-exp 0 for a row without keys."""

    def log_sum(self, sums: Tensor, listed: Tensor) -> Tensor:
        return torch.where(listed.any(), sums, 0.0)


class UnclearedEntries(ListFlash):
    """Multiplies the values of stale entries by zero."""

    def rows_at(self, cache: KVCache, slots: Tensor) -> Tensor:
        return super().rows_at(cache, slots.clamp(0, cache.parts[0].shape[0] * self.shape.page_size - 1))

    def read(self, slots: Tensor, listed: Tensor) -> Tensor:
        return slots

    def cleared(self, rows: Tensor, used: Tensor) -> Tensor:
        return rows


class WholePages(ListSplit):
    """Multiplies by zero the values of all keys in the page of a listed key."""

    def rows_at(self, cache: KVCache, slots: Tensor) -> Tensor:
        rows = super().rows_at(cache, slots)
        pages = torch.cat([part[self.page_of(slots)] for part in cache.parts], -1).float()
        return rows + 0.0 * pages.sum(1)


class OwnKeyToo(ListSplit):
    """Attends to the row's own key in place of the last entry, listed or not."""

    def entries(self, batch: ForwardBatch, row: int) -> Entries:
        slots, listed = super().entries(batch, row)
        own = self.slots[row].to(slots.dtype)
        first = torch.arange(len(slots), device=slots.device) == len(slots) - 1
        return torch.where(first, own, slots), listed | first


def _copied_with_the_metadata(backend: Any) -> None:
    """Copy the lists in write_metadata."""
    kept: dict[str, Chosen] = {}

    def write(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        if backend.geometry.attention.chosen_width and batch.chosen is not None:
            kept["lists"] = Chosen(batch.chosen.slots.clone(), batch.chosen.counts.clone())

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        original(q, cache, replace(batch, chosen=kept.get("lists", batch.chosen)), out, *lse)

    around(backend, "write_metadata", write)
    around(backend, "attend", attend)


class ListsOfTheFirstLayer(ListFlash):
    """Keeps the lists of the first layer until the next write_metadata."""

    kept: Chosen | None = None

    def write_metadata(self, batch: ForwardBatch) -> None:
        self.kept = None
        super().write_metadata(batch)

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        if self.kept is None:
            assert batch.chosen is not None
            self.kept = Chosen(batch.chosen.slots.clone(), batch.chosen.counts.clone())
        return self.kept.slots[row], self.kept.counts[row]


class CountsOfThePlan(ListSplit):
    """Takes the counts that the lists had in plan."""

    counts: Tensor | None = None

    def plan(self, batch: ForwardBatch) -> None:
        super().plan(batch)
        self.counts = None if batch.chosen is None else batch.chosen.counts.clone()

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        return slots, count if self.counts is None else self.counts[row].clamp(0, len(slots))


class SlotsAsPositions(ListFlash):
    """Drops listed keys with a slot after the row's own slot, as if slots were positions."""

    def entries(self, batch: ForwardBatch, row: int) -> Entries:
        slots, listed = super().entries(batch, row)
        return slots, listed & (slots <= self.slots[row])


class PrefixKeysOnly(ListSplit):
    """Drops listed keys of the other new rows of the batch."""

    def entries(self, batch: ForwardBatch, row: int) -> Entries:
        slots, listed = super().entries(batch, row)
        new = torch.isin(slots.long(), self.slots[: batch.num_rows]) & (slots != self.slots[row])
        return slots, listed & ~new


def _own_key_twice(batch: ForwardBatch, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Put the first key of a list over its second one."""
    second = (_entry(slots) == 1) & (counts > 2)[:, None] & (slots[:, :1] >= 0)
    return torch.where(second, slots[:, :1], slots), counts


class FirstThousand(ListFlash):
    """Reads at most 1,024 entries of a list."""

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        return slots, count.clamp(max=1024)


class FirstShares(ListSplit):
    """Merges the shares of the first 2,040 entries only."""

    def packed(self, q: Tensor, keys: Tensor, seen: Tensor, prefix: Tensor) -> Partial:
        first = torch.arange(len(keys), device=keys.device) < 2040
        return super().packed(q, keys, seen & first, prefix)


def _counts_of_one_byte(batch: ForwardBatch, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Keep eight bits of a count."""
    return slots, torch.where(counts > 0, counts & 255, counts)


class PagesOfFifteenBits(ListFlash):
    """Keeps 15 bits of a page id."""

    def page_of(self, slots: Tensor) -> Tensor:
        return super().page_of(slots) & 0x7FFF


class SlotsOfTwentyBits(ListSplit):
    """Keeps 20 bits of a slot."""

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        return torch.where(slots >= 0, slots & 0xFFFFF, slots), count


def _wrapped(backend: Any) -> None:
    """Wrap slot · head_dim at 2**31."""
    a = backend.geometry.attention
    on_lists(lambda batch, slots, counts: (torch.where(slots >= 0, slots % (2**31 // a.head_dim), slots), counts))(
        backend
    )


def _zeros(backend: Any) -> None:
    """Write zeros for layers with lists."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        original(q, cache, batch, out, *lse)
        if Profile.CHOSEN_KEYS in profiles_of(backend.geometry):
            out.zero_()

    around(backend, "attend", call)


MUTANTS = (
    chosen_mutant("C01", "Reads entries after the count of a list", AfterTheCount),
    chosen_mutant("C02", "Takes -1 in a list for the last slot of the pool", HolesAreTheLastSlot),
    on_reference("C03", "Ends a list at its first -1", on_lists(_ends_at_a_hole)),
    chosen_mutant("C04", "Reads the list with the index of the row's request", ListsByRequest, "vllm#47238"),
    chosen_mutant("C05", "Attends to the first entry of an empty list", AtLeastOneEntry),
    chosen_mutant("C06", "Drops the last entries of a list", FullTiles),
    on_reference("C07", "Drops the last entry of a full list", on_lists(_one_entry_less), "vllm#55563"),
    chosen_mutant("C08", "Returns the log-sum-exp 0 for an empty list", EmptyRowsSumToZero),
    chosen_mutant("C09", "Multiplies the values of stale entries by zero", UnclearedEntries, "vllm#43961"),
    chosen_mutant("C10", "Multiplies the keys next to a listed key by zero", WholePages, "vllm#43961"),
    chosen_mutant("C11", "Attends to the row's own key, listed or not", OwnKeyToo),
    on_reference("C12", "Copies the lists with the metadata", _copied_with_the_metadata),
    chosen_mutant("C13", "Keeps the lists of the first layer", ListsOfTheFirstLayer, "ATOM#1362"),
    chosen_mutant("C14", "Takes the counts that the lists had in plan", CountsOfThePlan),
    chosen_mutant("C15", "Drops listed keys with a larger slot than the row's own", SlotsAsPositions),
    chosen_mutant("C16", "Drops listed keys of other new rows", PrefixKeysOnly),
    on_reference("C17", "Counts the first key of a list twice", on_lists(_own_key_twice)),
    chosen_mutant("C27", "Reads at most 1,024 entries of a list", FirstThousand),
    chosen_mutant("C28", "Merges the first 2,040 entries of a list", FirstShares, "vllm#55563"),
    on_reference("C29", "Keeps eight bits of a count", on_lists(_counts_of_one_byte)),
    chosen_mutant("C33", "Keeps 15 bits of a listed page", PagesOfFifteenBits, "vllm#47671"),
    chosen_mutant("C34", "Keeps 20 bits of a listed slot", SlotsOfTwentyBits, "vllm#47671"),
    on_reference("C35", "Wraps slot · head_dim of listed rows at 2**31", _wrapped, "vllm#47671"),
    on_reference("C40", "Writes zeros for layers with lists", _zeros),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("C01", "C02", "C03", "C04", "C40"), "chosen.rows_see_their_lists"),
    **dict.fromkeys(("C05", "C06", "C07", "C08"), "chosen.lists_may_have_any_length"),
    **dict.fromkeys(("C09", "C10", "C11"), "chosen.other_keys_reach_no_output"),
    **dict.fromkeys(("C12", "C13", "C14"), "chosen.lists_belong_to_the_next_layer"),
    **dict.fromkeys(("C15", "C16", "C17"), "chosen.a_tree_is_a_list"),
    **dict.fromkeys(("C27", "C28", "C29"), "chosen.wide_lists_are_right"),
    **dict.fromkeys(("C33", "C34", "C35"), "chosen.slots_may_lie_past_int32"),
}
