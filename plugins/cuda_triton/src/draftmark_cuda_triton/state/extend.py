"""Recurrence of a prompt (EXTEND) in chunks: every row of a request, and the state after the last row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton

from draftmark import Gate, Recurrence, StateGeometry
from draftmark.runtime import ForwardBatch

from ..kernel_variants import kernels, select_variant
from ..launch.launcher import launch_kernel
from . import extend_sizing as sizing
from .launching import Launch
from .recur import ROW_TENSORS, decay_strides, head_strides, launch_rows, row_tensors
from .sizing import state_blocks


class Extend:
    """Runs the recurrence of EXTEND batches in chunks of `extend_sizing.CHUNK` rows.

    A delta rule takes two launches. The first prepares all chunks in parallel; the second carries the state through the
    chunks of each request. Other recurrences take one launch. Shapes outside `runs_in_chunks` run row by row.

    Args:
        geometry: the layer's geometry.
        buffers: arena buffers by name; those of `extend_sizing.extend_buffers` are this object's own.
    """

    def __init__(self, geometry: StateGeometry, buffers: Mapping[str, torch.Tensor]) -> None:
        self._shape, self._buffers = geometry.state, buffers
        self._in_chunks = sizing.runs_in_chunks(geometry)
        self._state_blocks, self._blocks = state_blocks(geometry), sizing.extend_blocks(geometry)
        self._launch = Launch(self.launch, ROW_TENSORS)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Do nothing: the kernels find their chunks from q_indptr."""

    def recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        state: torch.Tensor,
        batch: ForwardBatch,
        out: torch.Tensor,
    ) -> None:
        """Compute each row, and leave the state after each request's last row in its slot. Capturable.

        A request without rows keeps its slot. Prefix length 0 means a state of zeros, whatever the slot holds.

        Args:
            q, k, v, log_decay, beta, out: as in `StateBackend.recur`.
            state: ``[num_slots, num_heads, value_dim, key_dim]`` of one layer, a slot contiguous; read and written.
        """
        tensors = row_tensors(q, k, v, log_decay, beta, state, batch, out)
        self._launch((), tensors, mutates=(out, state, *self._scratch()))

    def launch(self, *tensors: Any) -> None:
        """Launch the kernels of a batch; the tensors are those of `row_tensors`."""
        if not self._in_chunks:
            launch_rows(self._shape, self._state_blocks, False, *tensors)
        elif self._shape.recurrence is Recurrence.DELTA:
            self._launch_delta(*tensors)
        else:
            self._launch_decay(*tensors)

    def _scratch(self) -> list[torch.Tensor]:
        names = (sizing.GATES, sizing.SOLVED, sizing.SCORES, sizing.KEYS_IN, sizing.KEYS_OUT, sizing.QUERIES)
        return [self._buffers[name] for name in names if name in self._buffers]

    def _launch_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor,
        state: torch.Tensor,
        slots: torch.Tensor,
        prefix_lens: torch.Tensor,
        q_indptr: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launch `prepare_head` or `prepare_key`, then `extend_delta`."""
        s, blocks, scratch, requests = self._shape, self._blocks, self._scratch(), len(slots)
        by_key = s.gate is Gate.KEY
        constants = {
            "HEADS": s.num_heads, "HEADS_PER_KEY": s.heads_per_key, "KEY_DIM": s.key_dim, "BLOCK_K": blocks.block_k,
            "PRECISION": blocks.precision,
        }  # fmt: skip
        prepare = kernels.state_extend_prepare.prepare_key if by_key else kernels.state_extend_prepare.prepare_head
        # float16 has too few exponents for the factors of a decay ratio.
        own = {"WIDE": s.dtype != "bfloat16"} if by_key else {}
        launch_kernel(
            select_variant(prepare, q), (s.num_heads * (q.shape[0] // sizing.CHUNK + requests),),
            q, k, log_decay, beta, q_indptr, *scratch, requests, *head_strides(q, k), *decay_strides(s, log_decay),
            beta.stride(0), **constants, **own, num_warps=blocks.prepare_warps,
        )  # fmt: skip
        keyed = scratch[3:] if by_key else scratch[2:3] * 3
        launch_kernel(
            select_variant(kernels.state_extend.extend_delta, q), self._grid(requests),
            q, k, v, *scratch[:3], *keyed, state, slots, prefix_lens, q_indptr, out, *head_strides(q, k, v),
            state.stride(0), **constants, VALUE_DIM=s.value_dim, BLOCK_V=blocks.block_v, BY_KEY=by_key,
            STAGES=blocks.stages, num_warps=blocks.num_warps,
        )  # fmt: skip

    def _launch_decay(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: None,
        state: torch.Tensor,
        slots: torch.Tensor,
        prefix_lens: torch.Tensor,
        q_indptr: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Launch `extend_decay`."""
        s, blocks = self._shape, self._blocks
        launch_kernel(
            select_variant(kernels.state_extend.extend_decay, q), self._grid(len(slots)),
            q, k, v, log_decay, state, slots, prefix_lens, q_indptr, out, *head_strides(q, k, v),
            *decay_strides(s, log_decay), state.stride(0), HEADS=s.num_heads, HEADS_PER_KEY=s.heads_per_key,
            KEY_DIM=s.key_dim, VALUE_DIM=s.value_dim, BLOCK_K=blocks.block_k, BLOCK_V=blocks.block_v,
            CONSTANT=s.gate is Gate.CONSTANT,
            PRECISION=blocks.precision, STAGES=blocks.stages, num_warps=blocks.num_warps,
        )  # fmt: skip

    def _grid(self, requests: int) -> tuple[int, int]:
        return self._shape.num_heads * triton.cdiv(self._shape.value_dim, self._blocks.block_v), requests


def launch_all(
    geometry: StateGeometry, tensors: tuple[torch.Tensor | None, ...], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Call the launch code of every kernel that `Extend` can launch, for the list of compiled kernels.

    Args:
        tensors: stand-ins of the tensors of ROW_TENSORS.
        buffers: stand-ins of the buffers by name.
    """
    Extend(geometry, buffers).launch(*tensors)
