"""Mutants that checks of `state` kill: commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Mode, StateGeometry
from draftmark.runtime import ForwardBatch, StateCache, StatePool, VerifyResult

from ...designs.masked_states import Masked
from ...designs.state_designs import LEAVES_STATE, Columns, StateDesign, View
from ...designs.state_mutants import reference_mutant, sized_mutant, state_mutant
from ...mutant import around


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


class GateByAnotherFormula(Masked):
    """Computes the gate of the commit by 1 + log decay."""

    def keep_records(self, cache: StateCache, view: View, u: Tensor, k: Tensor, decay: Tensor) -> None:
        super().keep_records(cache, view, u, k, torch.log1p(decay.clamp(min=-0.9)))


def _one_row_short(geometry: StateGeometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:2], max(0, shape[2] - 1), *shape[3:])


def _after(change: Callable[..., Any]) -> Callable[[Any], None]:
    """Return a patch that changes the result or the arguments of the state after accepted rows."""
    return lambda backend: around(backend, "_after", change)


def _window_stays(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    state, _ = original(committed, path, count, layer)
    return state, committed[1].transpose(1, 2)


def _state_stays(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    _, window = original(committed, path, count, layer)
    return committed[0], window


def _in_order(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    order = torch.arange(path.shape[1], device=path.device).expand_as(path)
    return original(committed, order, count, layer)


def _first_layer(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    return original(committed, path, count, 0)


def _one_row_less(original: Any, committed: Any, path: Tensor, count: Tensor, layer: int) -> Any:
    return original(committed, path, torch.where(count > 1, count - 1, count), layer)


def _without_strength(backend: Any) -> None:
    """Replay rows with a strength of 1."""

    def keep(original: Any, rows: tuple[Tensor | None, ...], layer: int) -> None:
        *others, beta = rows
        original((*others, None if beta is None else torch.ones_like(beta)), layer)

    around(backend, "_keep_rows", keep)


def _verifies_in_place(backend: Any) -> None:
    """Write the slot from the first row of a verify in the last layer."""

    def recur(original: Any, *args: Any) -> None:
        original(*args)
        *_, cache, batch, _ = args
        if batch.mode is Mode.VERIFY and "states" in set(backend.arena):
            slots = batch.state_slots.long()
            cache.state[slots] = backend.arena["states"][cache.layer, : len(slots), 0].to(cache.state.dtype)

    around(backend, "recur", recur)


MUTANTS = (
    state_mutant("E01", "Decodes from column 0 of the last verify", DecodesFromColumnZero, "vllm#39273"),
    state_mutant("E02", "Never commits a RAGGED_VERIFY", NeverCommitsRows, "sglang#26351"),
    state_mutant("E03", "Commits the recurrence without the window", KeepsTheWindow, "mlx-swift-lm#218"),
    state_mutant("E04", "Commits the window of all rows", WindowOfAllRows, "llama.cpp#26695"),
    state_mutant("E05", "Takes every round's window for one of D rows", WindowOfFullRounds, "vLLM's CPU convolution"),
    state_mutant("E06", "Clamps the accepted count to 3", ThreeAccepted, "xLLM#2247"),
    state_mutant("E07", "Commits rows that a request does not have", CountsOfTheWalk, "vllm-ascend#9956"),
    state_mutant("E08", "Takes the accepted count of a neighbor", CountsOfTheNeighbor, "vllm#55504"),
    state_mutant("E09", "Takes row count - 1 for the leaf", LeafOfTheCount, "sglang#27463"),
    state_mutant("E10", "Writes column -1 if nothing is accepted", ColumnBeforeTheFirst, "vllm#56419"),
    state_mutant("E11", "Folds one record too many", OneRowTooMany, "atlas#604"),
    state_mutant("E12", "Folds records in order instead of the path", RecordsInOrder, "TRT-LLM#16759"),
    state_mutant("E13", "Writes the slot from a verify of one row", RowsInPlace, "vllm#36917"),
    state_mutant("E14", "Commits the first layer only", CommitsOneLayer, "sglang#30862"),
    state_mutant("E15", "Runs trees as chains", TreesAsChains, "sglang#11133"),
    state_mutant("E16", "Convolves trees as chains", WindowsAsChains, "flashinfer#4151"),
    state_mutant("E17", "Reads one mask word", MaskOfOneWord, "sglang#11133"),
    state_mutant("E37", "Computes the commit's gate by another formula", GateByAnotherFormula, "sglang#33630"),
    sized_mutant("E46", "Sizes columns for D - 1 rows", Columns, _one_row_short, "vllm#39809"),
    reference_mutant(
        "E53", "Commits a snapshot without its window", "snapshots", _after(_window_stays), "mlx-swift-lm#218"
    ),
    reference_mutant("E54", "Commits a window without its state", "replay", _after(_state_stays), "llama.cpp#20075"),
    reference_mutant("E55", "Takes snapshots in order", "snapshots", _after(_in_order), "sglang#27463"),
    reference_mutant("E56", "Replays rows in order", "replay", _after(_in_order), "TRT-LLM#16759"),
    reference_mutant(
        "E57", "Commits every layer from the first one's rows", "replay", _after(_first_layer), "sglang#33497"
    ),
    reference_mutant("E58", "Commits one row less", "snapshots", _after(_one_row_less), "vllm#50021"),
    reference_mutant("E61", "Replays rows with a strength of 1", "replay", _without_strength, "sglang#28695"),
    reference_mutant("E63", "Writes the slot from a verify", "snapshots", _verifies_in_place, "llama.cpp#26695"),
)
KILLER = {
    **dict.fromkeys(("E01", "E02", "E05", "E07", "E08"), "state.rounds_of_any_rows"),
    **dict.fromkeys(
        (
            "E03",
            "E04",
            "E06",
            "E09",
            "E10",
            "E11",
            "E12",
            "E14",
            "E37",
            "E46",
            "E53",
            "E54",
            "E55",
            "E56",
            "E57",
            "E58",
            "E61",
        ),
        "state.commit_keeps_the_path",
    ),
    **dict.fromkeys(("E13", "E63"), "state.verify_leaves_the_slot"),
    **dict.fromkeys(("E15", "E16", "E17"), "state.rows_follow_their_parents"),
}
