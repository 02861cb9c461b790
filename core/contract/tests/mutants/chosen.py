"""Mutants C01 … C43: lists of chosen keys in three designs, their sizes and their claims."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import BufferSpec, Form, Geometry, Role, Unit
from draftmark.batch import Chosen, ForwardBatch
from draftmark.cache import KVCache
from draftmark_contract.profiles import Profile, profiles_of

from .chosen_designs import Listed, ListFlash, ListSplit, listed_plugin
from .latent_designs import Partial
from .mutant import ONLY, Mutant, around, shaped

Tensor = torch.Tensor
IN_ONE_DESIGN = "one design is enough"
Entries = tuple[Tensor, Tensor]


def _lists(change: Callable[[ForwardBatch, Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Any], None]:
    """Return a patch that gives `attend` of layers with lists other slots and counts."""

    def patch(backend: Any) -> None:
        def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
            if backend.geometry.attention.chosen_width:
                found = change(batch, batch.chosen.slots, batch.chosen.counts)
                batch = replace(batch, chosen=Chosen(*found))
            original(q, cache, batch, out, *lse)

        around(backend, "attend", call)

    return patch


def _entry(slots: Tensor) -> Tensor:
    return torch.arange(slots.shape[1], device=slots.device)


# -- entries of a list ----------------------------------------------------------------------------------------


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


# -- lengths --------------------------------------------------------------------------------------------------


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


# -- other keys -----------------------------------------------------------------------------------------------


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


# -- layers ---------------------------------------------------------------------------------------------------


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


# -- trees ----------------------------------------------------------------------------------------------------


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


# -- padding --------------------------------------------------------------------------------------------------


class LiveRowsOnly(ListFlash):
    """Leaves the rows of padded requests as they are."""

    def num_rows(self, batch: ForwardBatch) -> int:
        return sum(batch.q_lens[: batch.num_reqs])


class SixteenRows(ListSplit):
    """Computes at most 16 rows."""

    def num_rows(self, batch: ForwardBatch) -> int:
        return min(16, batch.num_rows)


def _stale_lists_of_padding(backend: Any) -> None:
    """Read the lists of padding rows after the last request."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        if backend.geometry.attention.chosen_width:
            indptr = batch.q_indptr.clone()
            indptr[-1] = batch.num_rows
            batch = replace(batch, q_indptr=indptr)
        original(q, cache, batch, out, *lse)

    around(backend, "attend", call)


# -- forms of an engine ---------------------------------------------------------------------------------------


def _packed_pages(backend: Any) -> None:
    """Read the listed rows of strided pages as if the pages were packed."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        if backend.geometry.attention.chosen_width and Form.STRIDED_KV in backend.geometry.forms:
            rows = cache.k[:, :, 0]
            packed = rows.as_strided(rows.shape, torch.empty(rows.shape, device="meta").stride(), rows.storage_offset())
            cache = KVCache.latent(packed, value_dim=cache.v.shape[-1])
        original(q, cache, batch, out, *lse)

    around(backend, "attend", call)


class PagesOfTheTable(ListFlash):
    """Takes slot // page_size for a column of the page table."""

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        size = self.shape.page_size
        page = batch.page_table.flatten()[(slots // size).clamp(0, batch.page_table.numel() - 1).long()]
        return torch.where(slots >= 0, page * size + slots % size, slots), count


class StoresAnyway(ListSplit):
    """Writes zeros to the rows' slots although the engine has stored KV."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, lse: Tensor | None = None) -> None:
        if Form.ENGINE_STORES in self.geometry.forms:
            cache.parts[0].flatten(0, 1).index_fill_(0, self.slots[: batch.num_rows].clamp(min=0), 0.0)
        super().attend(q, cache, batch, out, lse)


# -- features and widths --------------------------------------------------------------------------------------


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


# -- graphs ---------------------------------------------------------------------------------------------------


def _lists_of_the_capture(backend: Any) -> None:
    """Read the lists that the first plan of a batch size copied to memory of the backend."""
    kept: dict[int, Chosen] = {}

    def plan(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        if batch.chosen is not None:
            kept.setdefault(batch.num_rows, Chosen(batch.chosen.slots.clone(), batch.chosen.counts.clone()))

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        original(q, cache, replace(batch, chosen=kept.get(batch.num_rows, batch.chosen)), out, *lse)

    around(backend, "plan", plan)
    around(backend, "attend", attend)


class RowsOfTheCapture(ListFlash):
    """Computes the live rows of the batch that was captured."""

    def num_rows(self, batch: ForwardBatch) -> int:
        return max(1, sum(batch.q_lens[: batch.num_reqs]))


class CountsOnTheHost(ListSplit):
    """Reads the counts on the host, so that a graph keeps those of its capture."""

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        return slots, torch.tensor(int(count), device=slots.device)


# -- histories ------------------------------------------------------------------------------------------------


class ListsByRows(ListFlash):
    """Keeps the lists of the first eager forward of a mode and a number of rows."""

    def __init__(self, geometry: Geometry, arena: Any) -> None:
        super().__init__(geometry, arena)
        self.kept: dict[Any, Chosen] = {}

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        assert batch.chosen is not None
        now = Chosen(batch.chosen.slots.clone(), batch.chosen.counts.clone())
        kept = self.kept.setdefault((batch.mode, batch.num_rows), now)
        return kept.slots[row], kept.counts[row]


class AfterAFailure(ListSplit):
    """Reads one entry of each list in the forward after one that failed between plan and attend."""

    planned = failed = False

    def plan(self, batch: ForwardBatch) -> None:
        self.failed, self.planned = self.planned, True
        super().plan(batch)

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, lse: Tensor | None = None) -> None:
        super().attend(q, cache, batch, out, lse)
        self.planned = False

    def list_of(self, batch: ForwardBatch, row: int) -> Entries:
        slots, count = super().list_of(batch, row)
        return slots, count.clamp(max=1) if self.failed else count


def _largest_counts_so_far(backend: Any) -> None:
    """Read a row's list up to the largest count of its earlier lists, where the entries are slots."""
    a = backend.geometry.attention
    most = torch.zeros(backend.geometry.max_rows_any, dtype=torch.int32)

    def change(batch: ForwardBatch, slots: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
        seen = most[: len(counts)]
        live = torch.where(torch.arange(len(counts)) < batch.q_indptr[-1], counts, 0)
        torch.maximum(seen, live, out=seen)
        used = slots <= batch.page_table.max() * a.page_size
        return torch.where(used, slots, -1), torch.maximum(live, seen)

    if a.chosen_width:
        _lists(change)(backend)


# -- far slots ------------------------------------------------------------------------------------------------


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
    _lists(lambda batch, slots, counts: (torch.where(slots >= 0, slots % (2**31 // a.head_dim), slots), counts))(
        backend
    )


# -- sizes and claims -----------------------------------------------------------------------------------------


def _with_lists(shape: Callable[[Geometry], tuple[int, ...]], role: Role = Role.CHOSEN_SLOTS) -> dict[str, Any]:
    """Return a hook that adds a buffer for a copy of the lists."""

    def buffers(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        own = BufferSpec("own_lists", role, shape(geometry), "int32", Unit.SLOTS, "rows × chosen_width")
        return [*specs, own] if geometry.attention.chosen_width else specs

    return {"buffers": buffers}


def _refuses(when: Callable[[Geometry], bool], reason: str) -> dict[str, Any]:
    return {"supports": lambda geometry, reasons: [*reasons, *[reason] * when(geometry)]}


def _zeros(backend: Any) -> None:
    """Write zeros for layers with lists."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        original(q, cache, batch, out, *lse)
        if Profile.CHOSEN_KEYS in profiles_of(backend.geometry):
            out.zero_()

    around(backend, "attend", call)


def _without(**fields: Any) -> Callable[[Any], None]:
    """Return a patch that drops a field of the attention shape of layers with lists."""
    return lambda backend: shaped(**fields)(backend) if backend.geometry.attention.chosen_width else None


def _no_sinks(backend: Any) -> None:
    """Leave the sinks out of layers with lists."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Any) -> None:
        if backend.geometry.attention.chosen_width and cache.sinks is not None:
            cache = replace(cache, sinks=torch.full_like(cache.sinks, float("-inf")))
        original(q, cache, batch, out, *lse)

    around(backend, "attend", call)


def _design(name: str, what: str, backend: type[Listed], source: str = "") -> Mutant:
    return Mutant(name, what, source, layouts=("tutorial",), absent=ONLY, plugin=listed_plugin(backend))


def _reference(
    name: str, what: str, patch: Callable[[Any], None] | None = None, source: str = "", hooks: Any = None
) -> Mutant:
    return Mutant(name, what, source, hooks, patch, layouts=("reference",), absent=IN_ONE_DESIGN)


def _has_lists(geometry: Geometry) -> bool:
    return geometry.attention.chosen_width > 0


MUTANTS = (
    _design("C01", "Reads entries after the count of a list", AfterTheCount),
    _design("C02", "Takes -1 in a list for the last slot of the pool", HolesAreTheLastSlot),
    _reference("C03", "Ends a list at its first -1", _lists(_ends_at_a_hole)),
    _design("C04", "Reads the list with the index of the row's request", ListsByRequest, "vllm#47238"),
    _design("C05", "Attends to the first entry of an empty list", AtLeastOneEntry),
    _design("C06", "Drops the last entries of a list", FullTiles),
    _reference("C07", "Drops the last entry of a full list", _lists(_one_entry_less), "vllm#55563"),
    _design("C08", "Returns the log-sum-exp 0 for an empty list", EmptyRowsSumToZero),
    _design("C09", "Multiplies the values of stale entries by zero", UnclearedEntries, "vllm#43961"),
    _design("C10", "Multiplies the keys next to a listed key by zero", WholePages, "vllm#43961"),
    _design("C11", "Attends to the row's own key, listed or not", OwnKeyToo),
    _reference("C12", "Copies the lists with the metadata", _copied_with_the_metadata),
    _design("C13", "Keeps the lists of the first layer", ListsOfTheFirstLayer, "ATOM#1362"),
    _design("C14", "Takes the counts that the lists had in plan", CountsOfThePlan),
    _design("C15", "Drops listed keys with a larger slot than the row's own", SlotsAsPositions),
    _design("C16", "Drops listed keys of other new rows", PrefixKeysOnly),
    _reference("C17", "Counts the first key of a list twice", _lists(_own_key_twice)),
    _design("C18", "Leaves the rows of padded requests unwritten", LiveRowsOnly),
    _design("C19", "Computes the first 16 rows of a batch with lists", SixteenRows),
    _reference("C20", "Reads stale lists of padding rows", _stale_lists_of_padding, "vllm#42810"),
    _reference("C21", "Reads listed rows of strided pages as packed", _packed_pages, "flashinfer#1341"),
    _design("C22", "Takes a listed slot for a place in the page table", PagesOfTheTable, "sglang#28028"),
    _design("C23", "Writes KV that the engine has stored, with lists", StoresAnyway),
    _reference("C24", "Leaves the cap out with lists", _without(logits_soft_cap=0.0)),
    _reference("C25", "Leaves the sinks out with lists", _no_sinks),
    _reference(
        "C26", "Refuses lists of K and V apart without naming them",
        hooks=_refuses(lambda g: _has_lists(g) and not g.attention.latent, "this layer is not one of ours"),
    ),
    _design("C27", "Reads at most 1,024 entries of a list", FirstThousand),
    _design("C28", "Merges the first 2,040 entries of a list", FirstShares, "vllm#55563"),
    _reference("C29", "Keeps eight bits of a count", _lists(_counts_of_one_byte)),
    _reference("C30", "Reads the lists of the first plan of a size", _lists_of_the_capture),
    _design("C31", "Computes the live rows of the captured batch", RowsOfTheCapture),
    _design("C32", "Reads the counts of lists on the host", CountsOnTheHost),
    _design("C33", "Keeps 15 bits of a listed page", PagesOfFifteenBits, "vllm#47671"),
    _design("C34", "Keeps 20 bits of a listed slot", SlotsOfTwentyBits, "vllm#47671"),
    _reference("C35", "Wraps slot · head_dim of listed rows at 2**31", _wrapped, "vllm#47671"),
    _reference(
        "C36", "Sizes a copy of the lists by requests", source="vllm#34552",
        hooks=_with_lists(lambda g: (g.max_reqs, g.attention.chosen_width)),
    ),
    _reference(
        "C37", "Sizes a copy of the lists for 64 keys", source="vllm#55563",
        hooks=_with_lists(lambda g: (g.max_rows_any, min(64, g.attention.chosen_width))),
    ),
    _reference(
        "C38", "Sizes the counts of the lists by live requests",
        hooks=_with_lists(lambda g: (g.limits.max_num_reqs,), Role.CHOSEN_COUNTS),
    ),
    _reference(
        "C39", "Claims chosen keys, and refuses lists of 2,048 keys",
        hooks=_refuses(lambda g: g.attention.chosen_width >= 2048, "chosen_width above 2047 is not served here"),
    ),
    _reference("C40", "Writes zeros for layers with lists", _zeros),
    _design("C41", "Keeps the lists of the first forward of a size", ListsByRows, "sglang#31198"),
    _design("C42", "Reads one entry of each list after a failed forward", AfterAFailure),
    _reference("C43", "Reads entries up to the largest count of a row so far", _largest_counts_so_far),
)  # fmt: skip

KILLER = {
    **dict.fromkeys(("C01", "C02", "C03", "C04", "C40"), "chosen.rows_see_their_lists"),
    **dict.fromkeys(("C05", "C06", "C07", "C08"), "chosen.lists_may_have_any_length"),
    **dict.fromkeys(("C09", "C10", "C11"), "chosen.other_keys_reach_no_output"),
    **dict.fromkeys(("C12", "C13", "C14"), "chosen.lists_belong_to_the_next_layer"),
    **dict.fromkeys(("C15", "C16", "C17"), "chosen.a_tree_is_a_list"),
    **dict.fromkeys(("C18", "C19", "C20"), "chosen.padding_may_be_most"),
    **dict.fromkeys(("C21", "C22", "C23"), "chosen.engine_forms_may_have_lists"),
    **dict.fromkeys(("C24", "C25", "C26"), "chosen.features_are_served_or_refused"),
    **dict.fromkeys(("C27", "C28", "C29"), "chosen.wide_lists_are_right"),
    **dict.fromkeys(("C30", "C31", "C32"), "chosen.replays_read_other_lists"),
    **dict.fromkeys(("C33", "C34", "C35"), "chosen.slots_may_lie_past_int32"),
    **dict.fromkeys(("C36", "C37", "C38"), "chosen.buffers_cover_every_list"),
    **dict.fromkeys(("C41", "C42", "C43"), "chosen.histories_equal_the_oracle"),
    "C39": "chosen.claims_are_served",
}
"""Check that must kill each mutant."""
