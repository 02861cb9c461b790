"""Mutants that checks of `state`, `state_history` kill: sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Mode
from draftmark.runtime import ForwardBatch, StateCache, StatePool, VerifyResult, checkpoint_lens

from ...designs.masked_states import CHUNK, Masked
from ...designs.state_designs import Columns, StateDesign, View
from ...designs.state_mutants import reference_mutant, state_mutant
from ...mutant import around


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


class KeepsPlaceholders(Columns):
    """Keeps the state after the placeholders that fill a short chunk up to the longest of the batch."""

    def view(self, batch: ForwardBatch) -> View:
        found = super().view(batch)
        if batch.mode is Mode.EXTEND and len(found.count) > 1:
            return replace(found, valid=found.valid | (found.count[:, None] > 0))
        return found


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


def _reads_recycled(backend: Any) -> None:
    """Read the slot of a request without a prefix in EXTEND."""
    right = backend._state

    def state(cache: Any, batch: Any, some: slice = slice(None)) -> Tensor:
        if batch.mode is not Mode.EXTEND:
            return right(cache, batch, some)
        assert batch.state_slots is not None
        return cache.state[batch.state_slots.long()[some]].to(backend._compute)

    backend._state = state


def _reads_recycled_windows(backend: Any) -> None:
    """Read the window of a request without a prefix."""

    def window(cache: Any, batch: Any, some: slice = slice(None)) -> Tensor:
        found = cache.conv[batch.state_slots.long()[some]].transpose(1, 2)
        return found.to(getattr(torch, backend.geometry.state.dtype))

    backend._window = window


def _rounded(backend: Any) -> None:
    """Round the kept rows or states to bfloat16."""

    def keep(original: Any, *args: Any) -> None:
        original(*args)
        for name in ("states", "decays", "betas"):
            if name in set(backend.arena):
                backend.arena[name].copy_(backend.arena[name].to(torch.bfloat16))

    around(backend, "_keep_rows", keep)


def _moves_before_it_saves(backend: Any) -> None:
    """Move the slots first, and compute the checkpoint from the moved slots."""

    def commit(original: Any, pool: Any, batch: Any, accepted: VerifyResult | None, saves: Any = None) -> None:
        original(pool, batch, accepted, None)
        if saves is not None and accepted is not None:
            kept = [one.clone() for one in (pool.state, pool.conv)]
            original(pool, batch, accepted, saves)
            own = batch.state_slots.long()
            for one, before in zip((pool.state, pool.conv), kept, strict=True):
                one[:, own] = before[:, own]
        elif saves is not None:
            original(pool, batch, accepted, saves)

    around(backend, "commit", commit)


class ShortPrompts(Columns):
    """Leaves rows of a prompt after the 512th without an output, as a launch with a fixed number of chunks does."""

    def recur(self, *args: Any) -> None:
        super().recur(*args)
        *_, batch, out = args
        first = 0
        for rows in batch.q_lens if batch.mode is Mode.EXTEND else ():
            out[first + 512 : first + rows] = 0
            first += rows


MUTANTS = (
    state_mutant("E67", "Leaves rows of a prompt after the 512th without an output", ShortPrompts),
    state_mutant("E18", "Indexes columns by slot", ColumnsBySlot, "flashinfer#3145"),
    state_mutant("E19", "Reads a recycled slot before a first chunk of one token", ForgetsFresh, "vllm#51483"),
    state_mutant("E20", "Multiplies a recycled slot by zero", ZerosByMultiplying, "vllm#56524"),
    state_mutant("E22", "Keeps the state after placeholders", KeepsPlaceholders, "vllm#55178"),
    state_mutant("E26", "Takes a prompt of D tokens for a verify", PromptsAsVerifies, "vllm#49918"),
    state_mutant("E27", "Counts the decay from the chunk's start", DecayFromTheChunk, "vllm#23279"),
    state_mutant("E28", "Saves the end of the path as a checkpoint", SavesTheEnd, "vllm#53505"),
    state_mutant("E29", "Saves at multiples of attention's page", SavesByThePage, "vllm#53142"),
    state_mutant("E30", "Saves to a slot that is not lent", SavesWithoutASlot, "vllm#57605"),
    state_mutant("E31", "Saves no checkpoint after a verify", NeverSaves, "sglang#31099"),
    state_mutant("E32", "Saves a prompt's end off the grid", SavesOffTheGrid, "sglang#30938"),
    state_mutant("E33", "Rounds the columns to the state's dtype", RoundedColumns, "sglang#40419"),
    state_mutant("E34", "Stores updates in the activations' dtype", RecordsInActivations, "sglang#28695"),
    state_mutant("E35", "Reads states with two bytes a number", HalfOfTheState, "sglang#40419"),
    state_mutant("E36", "Stores windows in bfloat16", WindowsInBfloat16, "sglang#19785"),
    reference_mutant("E51", "Reads a recycled state in a prompt", "snapshots", _reads_recycled, "vllm#51483"),
    reference_mutant("E52", "Reads a recycled window", "replay", _reads_recycled_windows, "vllm-metal#488"),
    reference_mutant("E59", "Rounds snapshots to bfloat16", "snapshots", _rounded, "sglang#40419"),
    reference_mutant("E60", "Rounds replayed gates to bfloat16", "replay", _rounded, "sglang#33630"),
    reference_mutant("E62", "Saves after it has moved the slot", "replay", _moves_before_it_saves, "vllm#53479"),
)
KILLER = {
    "E18": "state_history.equals_the_oracle",
    **dict.fromkeys(("E19", "E20", "E51", "E52"), "state.no_prefix_is_zeros"),
    **dict.fromkeys(("E22", "E26", "E27", "E67"), "state.chunks_are_one_prefill"),
    **dict.fromkeys(("E28", "E29", "E30", "E31", "E32", "E62"), "state.checkpoint_is_its_length"),
    **dict.fromkeys(("E33", "E35", "E36"), "state.dtype_is_read_as_written"),
    **dict.fromkeys(("E34", "E59", "E60"), "state_history.does_not_drift"),
}
