"""State backend of the plugin: plan, write_metadata, convolve, recur and commit, over the arena's buffers."""

from __future__ import annotations

import torch

from draftmark import Mode, Recurrence, StateGeometry
from draftmark.runtime import Arena, ForwardBatch, StateCache, StatePool, Tree, VerifyResult

from .commit import COMMIT_TENSORS, launch_commit
from .convolve import CONV_TENSORS, ONE_TENSORS, launch_convolve_one, launch_convolve_rows, parents_of
from .extend import Extend
from .launching import Launch
from .recur import ROW_TENSORS, VERIFY_TENSORS, launch_rows, launch_verify, row_tensors
from .sizing import CHANNELS, DECAYS, KEYS, MATRICES, TOTALS, UPDATES, state_blocks, verify_blocks

EXTEND, DECODE = Mode.EXTEND, Mode.DECODE
"""Aliases of enum members: every layer reads them, and enum lookup is slow in Python 3.11."""


class TritonState:
    """State backend with one code path for eager mode, CUDA graph capture and replay.

    It needs no host lengths and never copies device data to the host. Rollback is by replay: a verify stores records
    of its rows, and `commit` adds the accepted rows' updates to the slot.
    """

    def __init__(self, geometry: StateGeometry, arena: Arena) -> None:
        self.geometry, self.arena = geometry, arena
        self._buffers = {name: arena[name] for name in arena}
        self._shape, self._max_reqs, self._blocks = geometry.state, geometry.max_reqs, state_blocks(geometry)
        self._verify_blocks = verify_blocks(geometry)
        self._convolve_one = Launch(launch_convolve_one, ONE_TENSORS)
        self._convolve_rows = Launch(launch_convolve_rows, CONV_TENSORS)
        self._rows, self._verify = Launch(launch_rows, ROW_TENSORS), Launch(launch_verify, VERIFY_TENSORS)
        self._commit = Launch(launch_commit, COMMIT_TENSORS)
        if geometry.state.recurrence is not Recurrence.NONE and EXTEND in geometry.modes:
            self._extend = Extend(geometry, self._buffers)

    def plan(self, batch: ForwardBatch) -> None:
        """Do nothing: no decision depends on host lengths."""

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write the metadata of an EXTEND that all layers share. The other modes need none."""
        if batch.mode is EXTEND and self._shape.recurrence is not Recurrence.NONE:
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
        shared = x, weight, bias, cache.conv, batch.state_slots, batch.prefix_lens
        if batch.mode is DECODE:
            self._convolve_one((self._shape,), (*shared, out), mutates=(out, cache.conv))
            return
        extend, channels = batch.mode is EXTEND, self._buffers[CHANNELS]
        values = self._shape, extend, max(batch.q_lens), cache.layer * self._max_reqs
        tensors = *shared, batch.q_indptr, parents_of(batch), channels, out
        self._convolve_rows(values, tensors, mutates=(out, cache.conv if extend else channels))

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
            self._extend.recur(q, k, v, log_decay, beta, cache.state, batch, out)
            return
        tensors = row_tensors(q, k, v, log_decay, beta, cache.state, batch, out)
        if batch.mode is DECODE:
            self._rows((self._shape, self._blocks, True), tensors, mutates=(out, cache.state))
            return
        records = tuple(self._buffers[name] for name in (KEYS, UPDATES, DECAYS, TOTALS, MATRICES))
        mask = batch.tail.mask if isinstance(batch.tail, Tree) else None
        self._verify(
            (self._shape, self._verify_blocks, cache.layer), (*tensors, mask, *records), mutates=(out, *records)
        )

    def commit(
        self,
        pool: StatePool,
        batch: ForwardBatch,
        accepted: VerifyResult | None,
        save_slots: torch.Tensor | None = None,
    ) -> None:
        """Move the slots of all layers over the accepted paths and save checkpoints, in one launch."""
        interval = self.geometry.limits.state_interval
        if accepted is None and (save_slots is None or interval == 0):
            return
        lens, path = (None, None) if accepted is None else (accepted.accept_lens, accepted.accept_index)
        records = tuple(self._buffers.get(name) for name in (KEYS, UPDATES, DECAYS, CHANNELS))
        self._commit(
            (self._shape, self._blocks, pool.null_slots, interval),
            (
                pool.state,
                pool.conv,
                batch.state_slots,
                save_slots,
                batch.prefix_lens,
                batch.q_indptr,
                lens,
                path,
                *records,
            ),
            mutates=(pool.state, pool.conv),
        )
