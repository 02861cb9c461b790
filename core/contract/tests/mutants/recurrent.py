"""Mutants E01 … E48 of recurrent state in designs other than the reference's: columns of an engine, and records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch

from draftmark import BufferSpec, StateGeometry
from draftmark.geometry import Mode
from draftmark.runtime import ForwardBatch, StateCache, StatePool, VerifyResult, checkpoint_lens

from . import recurrent_reference
from .mutant import ONLY, Mutant
from .state_designs import CHUNK, LEAVES_STATE, Columns, Masked, StateDesign, View, state_plugin

Tensor = torch.Tensor


# -- rounds and rollback --------------------------------------------------------------------------------------


class DecodesFromColumnZero(Columns):
    """Reads column 0 of the last verify in a decode, the state before its other accepted rows."""

    verified = False

    def recur(self, *args: Any) -> None:
        *_, batch, _ = args
        self.verified |= batch.mode not in LEAVES_STATE
        super().recur(*args)

    def first(self, slots: Tensor, view: View) -> Tensor:
        found = super().first(slots, view)
        if self.verified and found.dim() == 4 and view.index.shape[1] == 1:
            found = self.arena["columns"][0, : len(found), 0].clone()
        return found


class NeverCommitsRows(Masked):
    """Leaves the slot of a RAGGED_VERIFY as it was, as a drafter without a hook for the commit does."""

    def commit(
        self, pool: StatePool, batch: ForwardBatch, accepted: VerifyResult | None, save_slots: Tensor | None = None
    ) -> None:
        if batch.mode is not Mode.RAGGED_VERIFY:
            super().commit(pool, batch, accepted, save_slots)


class KeepsTheWindow(Masked):
    """Commits the recurrence and not the window."""

    def window_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        return self.first(cache.conv, view)


class WindowOfAllRows(Columns):
    """Commits the window after all rows of the verify."""

    def window_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        return super().window_after(cache, view, accepted, view.count)


class WindowOfFullRounds(Columns):
    """Takes the window of a round as if it had D rows."""

    def window_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        short = (view.count < self.geometry.draft.num_draft_tokens) & (view.count > 1)
        return super().window_after(cache, view, accepted, torch.where(short, (count - 1).clamp(min=0), count))


class ThreeAccepted(Masked):
    """Clamps the accepted count to the three columns of the window."""

    @staticmethod
    def counts(accepted: VerifyResult, view: View) -> Tensor:
        return StateDesign.counts(accepted, view).clamp(max=3)


class CountsOfTheWalk(Columns):
    """Commits the rows that the walk counts, also for a request that has none this round."""

    @staticmethod
    def counts(accepted: VerifyResult, view: View) -> Tensor:
        return accepted.accept_lens


class CountsOfTheNeighbor(Masked):
    """Takes the accepted count of the request before, where rounds have unequal rows."""

    @staticmethod
    def counts(accepted: VerifyResult, view: View) -> Tensor:
        right = StateDesign.counts(accepted, view)
        return torch.minimum(torch.where(view.count < view.count.max(), right.roll(1), right), view.count)


class LeafOfTheCount(Columns):
    """Takes row count - 1 for the last accepted row."""

    def state_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        order = torch.arange(accepted.accept_index.shape[1]).expand_as(accepted.accept_index)
        return super().state_after(cache, view, accepted._replace(accept_index=order), count)


class ColumnBeforeTheFirst(Columns):
    """Writes column -1 of the batch entry to the slot if nothing is accepted."""

    @staticmethod
    def counts(accepted: VerifyResult, view: View) -> Tensor:
        right = StateDesign.counts(accepted, view)
        return torch.where((right == 0) & (view.count > 0), view.count, right)


class OneRowTooMany(Masked):
    """Folds one record more than is accepted."""

    def state_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        return super().state_after(cache, view, accepted, torch.minimum(count + 1, view.count))


class RecordsInOrder(Masked):
    """Folds the first records instead of those of the accepted path."""

    def state_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        order = torch.arange(accepted.accept_index.shape[1]).expand_as(accepted.accept_index)
        return super().state_after(cache, view, accepted._replace(accept_index=order), count)


class RowsInPlace(Columns):
    """Treats a RAGGED_VERIFY in which a request has one row like a decode: the row writes the slot."""

    def recur(self, *args: Any) -> None:
        super().recur(*args)
        *_, cache, batch, _ = args
        if batch.mode is Mode.RAGGED_VERIFY:
            view = self.view(batch)
            self.store(cache.state, view.slots, self.columns(cache, view)[:, 0], view.count == 1)


class CommitsOneLayer(Masked):
    """Commits the first layer only."""

    def commit(
        self, pool: StatePool, batch: ForwardBatch, accepted: VerifyResult | None, save_slots: Tensor | None = None
    ) -> None:
        kept = [one[1:].clone() for one in (pool.state, pool.conv)]
        super().commit(pool, batch, accepted, save_slots)
        for one, before in zip((pool.state, pool.conv), kept, strict=True):
            one[1:] = before


# -- trees ----------------------------------------------------------------------------------------------------


class TreesAsChains(Columns):
    """Continues the row before instead of the parent."""

    def parents(self, batch: ForwardBatch, index: Tensor, t: Tensor) -> Tensor:
        return (t - 1).expand(index.shape)


class WindowsAsChains(Masked):
    """Convolves each row of a tree with the rows before it, instead of its ancestors."""

    def lineage(self, view: View, length: int) -> list[Tensor]:
        chain = torch.arange(view.index.shape[1]).expand(view.index.shape) - 1
        return super().lineage(replace(view, parents=chain), length)


class MaskOfOneWord(Masked):
    """Reads the first mask word for every row."""

    def reach(self, batch: ForwardBatch, view: View) -> Tensor:
        found = super().reach(batch, view)
        found[:, :, 32:] = found[:, :, : max(0, found.shape[2] - 32)]
        return found


# -- indices, slots and padding ---------------------------------------------------------------------------------


class ColumnsBySlot(Columns):
    """Reads the column of an accepted row by the request's slot instead of its batch entry."""

    def state_after(self, cache: StateCache, view: View, accepted: VerifyResult, count: Tensor) -> Tensor:
        whole = self.arena["columns"][cache.layer]
        leaf = accepted.accept_index.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        return whole[view.slots % len(whole), leaf]


class ForgetsFresh(Masked):
    """Reads the slot of a request without a prefix, if its first chunk has one token."""

    def first(self, slots: Tensor, view: View) -> Tensor:
        return super().first(slots, replace(view, fresh=view.fresh & (view.count != 1)))


class ZerosByMultiplying(Columns):
    """Multiplies the slot of a request without a prefix by zero."""

    def first(self, slots: Tensor, view: View) -> Tensor:
        found = slots[view.slots].to(self.inner)
        return found * (~view.fresh).to(found.dtype).view(-1, *[1] * (found.dim() - 1))


class PaddingInSlotOne(Masked):
    """Takes slot 1 for the null slot of a padded request."""

    def slots(self, batch: ForwardBatch) -> Tensor:
        return super().slots(batch).clamp(min=1)


class KeepsPlaceholders(Columns):
    """Keeps the state after the placeholders that fill a short chunk up to the longest of the batch."""

    def view(self, batch: ForwardBatch) -> View:
        found = super().view(batch)
        if batch.mode is Mode.EXTEND and len(found.count) > 1:
            return replace(found, valid=found.valid | (found.count[:, None] > 0))
        return found


class UnwrittenPadding(Masked):
    """Leaves the outputs of padded rows as they are."""

    def spread(self, values: Tensor, view: View, out: Tensor) -> None:
        total = torch.cat((out, out[:1]))
        total[torch.where(view.valid, view.index, len(out))] = values.to(out.dtype)
        out.copy_(total[:-1])


class WrapsOffsets(Columns):
    """Computes slot · elements in 32 bits."""

    def slots(self, batch: ForwardBatch) -> Tensor:
        numel = max(1, self.geometry.state_numel)
        wrapped = (super().slots(batch) * numel).to(torch.int32).long()
        return (wrapped // numel).clamp(min=0)


class WrapsWindows(Masked):
    """Computes slot · elements of windows in 32 bits."""

    def convolve(self, *args: Any) -> None:
        *_, batch, _ = args
        numel = max(1, self.geometry.conv_numel)
        wrapped = (self.slots(batch) * numel).to(torch.int32).long()
        moved = replace(batch, state_slots=(wrapped // numel).clamp(min=0).to(torch.int32))
        given: Any = (*args[:-2], moved, args[-1])
        super().convolve(*given)


# -- prompts ----------------------------------------------------------------------------------------------------


class PromptsAsVerifies(Masked):
    """Takes a prompt chunk of D tokens for a verify, and never writes its state."""

    def store(self, pool: Tensor, slots: Tensor, values: Tensor, wanted: Tensor) -> None:  # type: ignore[override]
        skipped = torch.zeros_like(wanted) if self.looks_like_a_verify is None else self.looks_like_a_verify
        StateDesign.store(pool, slots, values, wanted & ~skipped)

    looks_like_a_verify: Tensor | None = None

    def recur(self, *args: Any) -> None:
        *_, batch, _ = args
        rows = (batch.q_indptr[1:] - batch.q_indptr[:-1]) == self.geometry.draft.num_draft_tokens
        self.looks_like_a_verify = rows if batch.mode is Mode.EXTEND else None
        super().recur(*args)
        self.looks_like_a_verify = None


class DecayFromTheChunk(Masked):
    """Does not fade the state that a later chunk of a prompt begins with."""

    def outputs(self, state: Tensor, q: Tensor, k: Tensor, u: Tensor, total: Tensor, reach: Tensor) -> Tensor:
        if q.shape[1] == CHUNK:
            prefix = torch.einsum("rhvk,rthk->rthv", state, q)
            return prefix + torch.einsum("rhtj,rjhv->rthv", self.weights(q, k, total, reach), u)
        return super().outputs(state, q, k, u, total, reach)


# -- checkpoints ------------------------------------------------------------------------------------------------


class SavesTheEnd(Columns):
    """Saves the state after the whole path instead of at the multiple."""

    def moved(
        self, pool: StatePool, view: View, accepted: VerifyResult, count: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        return super().moved(pool, view, accepted, StateDesign.counts(accepted, view))


class SavesByThePage(Masked):
    """Saves at multiples of 16, the page of attention layers."""

    def commit(
        self, pool: StatePool, batch: ForwardBatch, accepted: VerifyResult | None, save_slots: Tensor | None = None
    ) -> None:
        right, limits = self.geometry, self.geometry.limits
        if limits.state_interval:
            self.geometry = replace(right, limits=replace(limits, state_interval=16))
        super().commit(pool, batch, accepted, save_slots)
        self.geometry = right


class SavesWithoutASlot(Columns):
    """Saves a checkpoint to the slot after the request's own if none is lent."""

    def commit(
        self, pool: StatePool, batch: ForwardBatch, accepted: VerifyResult | None, save_slots: Tensor | None = None
    ) -> None:
        if save_slots is not None:
            assert batch.state_slots is not None
            other = (batch.state_slots + 1).clamp(max=pool.num_slots - 1)
            save_slots = torch.where((save_slots == 0) & (batch.state_slots > 0), other, save_slots)
        super().commit(pool, batch, accepted, save_slots)


class NeverSaves(Masked):
    """Saves no checkpoint after a verify."""

    def commit(
        self, pool: StatePool, batch: ForwardBatch, accepted: VerifyResult | None, save_slots: Tensor | None = None
    ) -> None:
        super().commit(pool, batch, accepted, None if accepted is not None else save_slots)


class SavesOffTheGrid(Columns):
    """Saves the end of every prompt chunk that passes a multiple."""

    def commit(
        self, pool: StatePool, batch: ForwardBatch, accepted: VerifyResult | None, save_slots: Tensor | None = None
    ) -> None:
        super().commit(pool, batch, accepted, save_slots)
        if accepted is None and save_slots is not None:
            view = self.view(batch)
            passed = checkpoint_lens(batch.prefix_lens, view.count, self.geometry.limits.state_interval) > 0
            for whole in (pool.state, pool.conv):
                for layer in whole if whole.numel() else ():
                    self.store(layer, save_slots.long(), layer[view.slots], passed & (save_slots > 0))


# -- dtypes and drift ---------------------------------------------------------------------------------------------


class RoundedColumns(Columns):
    """Stores columns in the dtype of the state, so that a path is rounded once a row."""

    def as_column(self, state: Tensor) -> Tensor:
        return state.to(getattr(torch, self.shape.state_dtype)).to(state.dtype)


class RecordsInActivations(Masked):
    """Stores the updates of records in the dtype of activations."""

    def keep_records(self, cache: StateCache, view: View, u: Tensor, k: Tensor, decay: Tensor) -> None:
        super().keep_records(cache, view, u.to(getattr(torch, self.shape.dtype)).to(u.dtype), k, decay)


class HalfOfTheState(Columns):
    """Reads states with two bytes a number."""

    def first(self, slots: Tensor, view: View) -> Tensor:
        return super().first(slots, view).to(torch.bfloat16).to(self.inner)


class WindowsInBfloat16(Masked):
    """Stores windows in bfloat16 whatever their dtype."""

    @staticmethod
    def store(pool: Tensor, slots: Tensor, values: Tensor, wanted: Tensor) -> None:
        values = values.to(torch.bfloat16) if pool.dim() == 3 else values
        StateDesign.store(pool, slots, values, wanted)


class GateByAnotherFormula(Masked):
    """Computes the gate of the commit by 1 + log decay."""

    def keep_records(self, cache: StateCache, view: View, u: Tensor, k: Tensor, decay: Tensor) -> None:
        super().keep_records(cache, view, u, k, torch.log1p(decay.clamp(min=-0.9)))


class KeyHeadsByTurns(Columns):
    """Gives head h the key head h modulo the key heads."""

    def inputs(self, q: Tensor, k: Tensor, *rest: Any) -> Any:
        heads, keys = self.shape.num_heads, self.shape.num_key_heads
        order = torch.arange(heads) % keys
        found = super().inputs(q, k, *rest)
        view = rest[-1]
        return (self.by_request(q, view)[:, :, order], self.by_request(k, view)[:, :, order], *found[2:])


# -- graphs and processes ---------------------------------------------------------------------------------------


class StaleParents(Columns):
    """Copies the parents of the first batch of a size, and not again for a replay."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.copies: dict[tuple[Any, ...], Tensor] = {}

    def parents(self, batch: ForwardBatch, index: Tensor, t: Tensor) -> Tensor:
        key = batch.mode, index.shape
        if key not in self.copies:
            self.copies[key] = super().parents(batch, index, t).clone()
        return self.copies[key]


class LiveAtPlan(Masked):
    """Commits the requests that were live when the graph was captured."""

    live = 0

    def plan(self, batch: ForwardBatch) -> None:
        self.live = batch.num_reqs

    def counts(self, accepted: VerifyResult, view: View) -> Tensor:  # type: ignore[override]
        right = StateDesign.counts(accepted, view)
        return torch.where(torch.arange(len(right)) < self.live, right, 0)


class SlotsAtPlan(Columns):
    """Copies the slots of a batch when it is planned, before they reach the device."""

    copied: Tensor | None = None

    def plan(self, batch: ForwardBatch) -> None:
        self.copied = super().slots(batch).clone()

    def slots(self, batch: ForwardBatch) -> Tensor:
        assert self.copied is not None
        return self.copied[: batch.padded_reqs]


class ScratchOfTheProcess(Columns):
    """Keeps the columns in memory of the process, which all opens share."""

    scratch: ClassVar[dict[tuple[int, ...], Tensor]] = {}

    def columns(self, cache: StateCache, view: View) -> Tensor:
        whole = self.arena["columns"]
        shared = self.scratch.setdefault(tuple(whole.shape), torch.zeros_like(whole))
        return shared[cache.layer, : len(view.slots)]


class ChecksOnTheHost(Masked):
    """Skips a commit of nothing, which it decides on the host."""

    def commit(
        self, pool: StatePool, batch: ForwardBatch, accepted: VerifyResult | None, save_slots: Tensor | None = None
    ) -> None:
        if accepted is None or bool((accepted.accept_lens > 0).any()):
            super().commit(pool, batch, accepted, save_slots)


# -- sizes --------------------------------------------------------------------------------------------------------


def _resized(design: type[StateDesign], shape: Any) -> dict[str, Any]:
    """Return a plugin's field with buffers of other shapes. `shape` takes a geometry and a buffer's shape."""

    def state_buffers(self: Any, geometry: StateGeometry) -> list[BufferSpec]:
        kept = design.buffers(geometry)  # type: ignore[attr-defined]
        return [replace(one, shape=shape(geometry, one.shape)) for one in kept]

    return {"state_buffers": state_buffers}


def _without_padding(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], geometry.limits.max_num_reqs, *shape[2:])


def _of_one_layer(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *shape[1:])


def _one_row_short(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], max(0, shape[2] - 1), *shape[3:])


def _always_rows(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], 1 + geometry.draft.num_draft_tokens, *shape[3:])


def _by_steps(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], min(shape[2], geometry.draft.num_steps), *shape[3:])


def _design(name: str, what: str, design: type[StateDesign], source: str = "", **fields: Any) -> Mutant:
    plugin = state_plugin(design, **fields)
    return Mutant(name, what, source, layouts=("tutorial",), absent=ONLY, plugin=plugin, of_state=True)


def _sized(name: str, what: str, design: type[StateDesign], shape: Any, source: str) -> Mutant:
    return _design(name, what, design, source, **_resized(design, shape))


MUTANTS = (
    _design("E01", "Decodes from column 0 of the last verify", DecodesFromColumnZero, "vllm#39273"),
    _design("E02", "Never commits a RAGGED_VERIFY", NeverCommitsRows, "sglang#26351"),
    _design("E03", "Commits the recurrence without the window", KeepsTheWindow, "mlx-swift-lm#218"),
    _design("E04", "Commits the window of all rows", WindowOfAllRows, "llama.cpp#26695"),
    _design("E05", "Takes every round's window for one of D rows", WindowOfFullRounds, "vLLM's CPU convolution"),
    _design("E06", "Clamps the accepted count to 3", ThreeAccepted, "xLLM#2247"),
    _design("E07", "Commits rows that a request does not have", CountsOfTheWalk, "vllm-ascend#9956"),
    _design("E08", "Takes the accepted count of a neighbor", CountsOfTheNeighbor, "vllm#55504"),
    _design("E09", "Takes row count - 1 for the leaf", LeafOfTheCount, "sglang#27463"),
    _design("E10", "Writes column -1 if nothing is accepted", ColumnBeforeTheFirst, "vllm#56419"),
    _design("E11", "Folds one record too many", OneRowTooMany, "atlas#604"),
    _design("E12", "Folds records in order instead of the path", RecordsInOrder, "TRT-LLM#16759"),
    _design("E13", "Writes the slot from a verify of one row", RowsInPlace, "vllm#36917"),
    _design("E14", "Commits the first layer only", CommitsOneLayer, "sglang#30862"),
    _design("E15", "Runs trees as chains", TreesAsChains, "sglang#11133"),
    _design("E16", "Convolves trees as chains", WindowsAsChains, "flashinfer#4151"),
    _design("E17", "Reads one mask word", MaskOfOneWord, "sglang#11133"),
    _design("E18", "Indexes columns by slot", ColumnsBySlot, "flashinfer#3145"),
    _design("E19", "Reads a recycled slot before a first chunk of one token", ForgetsFresh, "vllm#51483"),
    _design("E20", "Multiplies a recycled slot by zero", ZerosByMultiplying, "vllm#56524"),
    _design("E21", "Writes padded requests to slot 1", PaddingInSlotOne, "tokenspeed#700"),
    _design("E22", "Keeps the state after placeholders", KeepsPlaceholders, "vllm#55178"),
    _design("E23", "Leaves padded outputs unwritten", UnwrittenPadding, "sglang#30974"),
    _design("E24", "Wraps slot · elements of states", WrapsOffsets, "sglang#31934"),
    _design("E25", "Wraps slot · elements of windows", WrapsWindows, "mamba#1015"),
    _design("E26", "Takes a prompt of D tokens for a verify", PromptsAsVerifies, "vllm#49918"),
    _design("E27", "Counts the decay from the chunk's start", DecayFromTheChunk, "vllm#23279"),
    _design("E28", "Saves the end of the path as a checkpoint", SavesTheEnd, "vllm#53505"),
    _design("E29", "Saves at multiples of attention's page", SavesByThePage, "vllm#53142"),
    _design("E30", "Saves to a slot that is not lent", SavesWithoutASlot, "vllm#57605"),
    _design("E31", "Saves no checkpoint after a verify", NeverSaves, "sglang#31099"),
    _design("E32", "Saves a prompt's end off the grid", SavesOffTheGrid, "sglang#30938"),
    _design("E33", "Rounds the columns to the state's dtype", RoundedColumns, "sglang#40419"),
    _design("E34", "Stores updates in the activations' dtype", RecordsInActivations, "sglang#28695"),
    _design("E35", "Reads states with two bytes a number", HalfOfTheState, "sglang#40419"),
    _design("E36", "Stores windows in bfloat16", WindowsInBfloat16, "sglang#19785"),
    _design("E37", "Computes the commit's gate by another formula", GateByAnotherFormula, "sglang#33630"),
    _design("E38", "Gives heads the key heads by turns", KeyHeadsByTurns, "vllm#13660"),
    _design("E39", "Replays with the parents of the capture", StaleParents, "sglang#31099"),
    _design("E40", "Commits the requests of the capture", LiveAtPlan, "vllm#49757"),
    _design("E41", "Reads the slots in plan()", SlotsAtPlan, "vllm#49620"),
    _design("E42", "Shares columns between opens", ScratchOfTheProcess, "vllm#48261"),
    _design("E43", "Reads the accepted counts on the host", ChecksOnTheHost, "sglang#29413"),
    _sized("E44", "Sizes columns without padded requests", Columns, _without_padding, "vllm#36639"),
    _sized("E45", "Sizes records for one layer", Masked, _of_one_layer, "sglang#39624"),
    _sized("E46", "Sizes columns for D - 1 rows", Columns, _one_row_short, "vllm#39809"),
    _sized("E47", "Sizes columns without a verify", Columns, _always_rows, "tokenspeed#397"),
    _sized("E48", "Sizes records by draft steps", Masked, _by_steps, "sglang#34096"),
    *recurrent_reference.MUTANTS,
)
KILLER = {
    **dict.fromkeys(("E01", "E02", "E05", "E07", "E08"), "state.rounds_of_any_rows"),
    **dict.fromkeys(("E03", "E04", "E06", "E09", "E10", "E11", "E12", "E14", "E37"), "state.commit_keeps_the_path"),
    "E13": "state.verify_leaves_the_slot",
    **dict.fromkeys(("E15", "E16", "E17"), "state.rows_follow_their_parents"),
    "E18": "state_history.equals_the_oracle",
    **dict.fromkeys(("E19", "E20"), "state.no_prefix_is_zeros"),
    **dict.fromkeys(("E21", "E23"), "state.padding_touches_no_slot"),
    **dict.fromkeys(("E22", "E26", "E27"), "state.chunks_are_one_prefill"),
    **dict.fromkeys(("E24", "E25"), "state.slots_reach_past_int32"),
    **dict.fromkeys(("E28", "E29", "E30", "E31", "E32"), "state.checkpoint_is_its_length"),
    **dict.fromkeys(("E33", "E35", "E36"), "state.dtype_is_read_as_written"),
    "E34": "state_history.does_not_drift",
    "E38": "state.shards_are_the_whole",
    **dict.fromkeys(("E39", "E40"), "state_graphs.replays_follow_their_slots"),
    "E41": "state.plan_does_not_depend_on_device_memory",
    "E42": "state.opens_are_apart",
    "E43": "state.calls_read_no_device_memory",
    **dict.fromkeys(("E44", "E45"), "state_sizing.grows_with_its_rows"),
    "E46": "state.commit_keeps_the_path",
    "E47": "state_sizing.is_tight",
    "E48": "state_sizing.covers",
    **recurrent_reference.KILLER,
}
"""Check that must kill each mutant."""
