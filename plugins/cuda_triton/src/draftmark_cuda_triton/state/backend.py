"""State backend of the plugin: plan, write_metadata, convolve, recur and commit, over the arena's buffers."""

from __future__ import annotations

import torch

from draftmark import Mode, Recurrence, StateGeometry
from draftmark.runtime import Arena, ForwardBatch, StateCache, StatePool, VerifyResult

from .extend import Extend
from .launching import Launch
from .recur import ROW_TENSORS, launch_rows, row_tensors
from .sizing import state_blocks

EXTEND, DECODE = Mode.EXTEND, Mode.DECODE
"""Aliases of enum members: every layer reads them, and enum lookup is slow in Python 3.11."""


class TritonState:
    """State backend with one code path for eager mode, CUDA graph capture and replay.

    It needs no host lengths and never copies device data to the host. Rollback is by replay: a verify stores records
    of its rows, and `commit` adds the accepted rows' updates to the slot.
    """

    def __init__(self, geometry: StateGeometry, arena: Arena) -> None:
        self.geometry, self.arena = geometry, arena
        buffers = {name: arena[name] for name in arena}
        self._shape = geometry.state
        if geometry.state.recurrence is not Recurrence.NONE:
            self._blocks = state_blocks(geometry)
            self._rows = Launch(launch_rows, ROW_TENSORS)
            self._extend = Extend(geometry, buffers) if EXTEND in geometry.modes else None

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: no decision depends on host lengths."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write what the layers of a prompt share; the other modes read the batch itself."""
        if batch.mode is EXTEND and self._shape.recurrence is not Recurrence.NONE:
            assert self._extend is not None
            self._extend.write_metadata(batch)

    def convolve(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        cache: StateCache,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Convolve each row with its ancestors, in one launch."""
        raise NotImplementedError

    def recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        cache: StateCache,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Compute the recurrence of each row: one launch in DECODE and verify modes."""
        if batch.mode is EXTEND:
            assert self._extend is not None
            self._extend.recur(q, k, v, log_decay, beta, cache.state, batch, out)
            return
        tensors = row_tensors(q, k, v, log_decay, beta, cache.state, batch, out)
        if batch.mode is DECODE:
            self._rows((self._shape, self._blocks, True), tensors, mutates=(out, cache.state))
            return
        raise NotImplementedError

    def commit(
        self,
        pool: StatePool,
        batch: ForwardBatch,
        accepted: VerifyResult | None,
        save_slots: torch.Tensor | None = None,
    ) -> None:
        """Move the slots of all layers over the accepted paths and save checkpoints, in one launch."""
        raise NotImplementedError
