"""Recurrence of a prompt (EXTEND): every row of a request, and the state after the last row."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from draftmark import StateGeometry
from draftmark.runtime import ForwardBatch

from .launching import Launch
from .recur import ROW_TENSORS, launch_rows, row_tensors
from .sizing import state_blocks


class Extend:
    """Runs the recurrence of EXTEND batches, row by row.

    Args:
        geometry: the layer's geometry.
        buffers: arena buffers by name; those of `extend_sizing.extend_buffers` are this object's own.
    """

    def __init__(self, geometry: StateGeometry, buffers: Mapping[str, torch.Tensor]) -> None:
        self._blocks, self._shape = state_blocks(geometry), geometry.state
        self._launch = Launch(launch_rows, ROW_TENSORS)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write what all layers of an EXTEND batch share. Capturable; nothing is needed row by row."""

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

        A request without rows keeps its slot. Prefix length 0 means a state of zeros, whatever the slot holds. The host
        has exact row counts in ``batch.q_lens``, and the device in ``batch.q_indptr``.

        Args:
            q, k, v, log_decay, beta, out: as in `StateBackend.recur`.
            state: ``[num_slots, num_heads, value_dim, key_dim]`` of one layer, read and written.
        """
        tensors = row_tensors(q, k, v, log_decay, beta, state, batch, out)
        self._launch((self._shape, self._blocks, False), tensors, mutates=(out, state))


def launch_all(
    geometry: StateGeometry, tensors: tuple[torch.Tensor | None, ...], buffers: Mapping[str, torch.Tensor]
) -> None:
    """Call the launch code of every kernel that `Extend` can launch, for the list of compiled kernels.

    Args:
        tensors: stand-ins of the tensors of ROW_TENSORS.
        buffers: stand-ins of the buffers by name.
    """
    launch_rows(geometry.state, state_blocks(geometry), False, *tensors)  # type: ignore[arg-type]
