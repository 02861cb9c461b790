"""Rows of a batch by request and tail slot, for the reference's recurrent layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmark import Mode
from draftmark.runtime import ForwardBatch, Tree

from ..attention import unpack_bits


@dataclass(frozen=True)
class Layout:
    """Rows of R requests with T tail slots each, on the device. Static shapes, no host read.

    Attributes:
        rows: int64 ``[R, T]``, row of each tail slot; any valid row for a slot without one.
        valid: bool ``[R, T]``, slots that are rows of their request.
        seen: bool ``[R, T, T]``, ancestors of each slot, itself included; only the slot itself where not valid.
        parents: int64 ``[R, T]``, parent slot, -1 for the committed state.
        owners: int64 ``[num_rows]``, index of each row in ``[R · T]``; any index for a padding row.
        owned: bool ``[num_rows]``, rows that are not padding rows.
    """

    rows: torch.Tensor
    valid: torch.Tensor
    seen: torch.Tensor
    parents: torch.Tensor
    owners: torch.Tensor
    owned: torch.Tensor

    def by_slot(self, values: torch.Tensor) -> torch.Tensor:
        """Gather rows ``[num_rows, …]`` into ``[R, T, …]``, with zeros where no row is."""
        found = values.index_select(0, self.rows.flatten()).view(*self.rows.shape, *values.shape[1:])
        return torch.where(_like(self.valid, found), found, 0)

    def by_row(self, values: torch.Tensor) -> torch.Tensor:
        """Gather ``[R, T, …]`` into rows ``[num_rows, …]``, with zeros for padding rows."""
        found = values.flatten(0, 1).index_select(0, self.owners)
        return torch.where(_like(self.owned, found), found, 0)


def layout_of(batch: ForwardBatch) -> Layout:
    """Return the layout of a DECODE, VERIFY or RAGGED_VERIFY batch."""
    slots, device = max(batch.tail_lens), batch.device
    slot = torch.arange(slots, device=device)
    starts, counts = batch.q_indptr[:-1, None].long(), batch.q_indptr.diff()[:, None]
    rows, valid = (starts + slot).clamp(max=batch.num_rows - 1), slot < counts
    row = torch.arange(batch.num_rows, dtype=torch.int32, device=device)
    request = (torch.searchsorted(batch.q_indptr, row, right=True) - 1).clamp(max=batch.padded_reqs - 1)
    owners = request * slots + (row - batch.q_indptr[request]).clamp(max=slots - 1)
    seen = torch.ones(batch.padded_reqs, slots, slots, dtype=torch.bool, device=device).tril()
    parents = (slot - 1).expand(batch.padded_reqs, -1)
    if isinstance(batch.tail, Tree):
        assert batch.tail.parents is not None, "validate requires the parents"
        by_row = batch.mode is Mode.RAGGED_VERIFY
        own = batch.tail.parents[rows] if by_row else batch.tail.parents
        # Slots of padding may hold stale masks and parents; a later slot is no ancestor.
        seen = seen & unpack_bits(batch.tail.mask, slots)[rows] & valid[:, None] & valid[..., None]
        parents = torch.minimum(own.long().clamp(min=-1), slot - 1)
    eye = torch.eye(slots, dtype=torch.bool, device=device)
    return Layout(rows, valid, seen | eye, parents, owners, row < batch.q_indptr[-1])


def _like(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return mask.view(*mask.shape, *[1] * (values.dim() - mask.dim()))
