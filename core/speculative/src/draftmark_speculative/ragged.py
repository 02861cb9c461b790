"""Which node of which tree each row of a RAGGED_VERIFY batch is. On the device, captured."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import BatchBuffers, ForwardBatch, Tree, TreeOps

if TYPE_CHECKING:
    from .adaptive.survival import Admitted


class PlacedRows(NamedTuple):
    """Rows and nodes, each way.

    Attributes:
        requests: int64 ``[rows]``, batch entry of each row; 0 for one that belongs to nobody.
        nodes: int64 ``[rows]``, place of each row's node in ``[R · D]``; the root of entry 0 for one of nobody.
        rows: int64 ``[R, D]``, row of each node; of an unused one any row.
    """

    requests: torch.Tensor
    nodes: torch.Tensor
    rows: torch.Tensor

    def of_nodes(self, values: torch.Tensor) -> torch.Tensor:
        """``[R, D, …]`` or ``[R · D, …]`` by node → ``[rows, …]``."""
        flat = values if len(values) == self.rows.numel() else values.flatten(0, 1)
        return flat.index_select(0, self.nodes)

    def by_node(self, values: torch.Tensor) -> torch.Tensor:
        """``[rows, …]`` → ``[R, D, …]``; what stands at an unused node means nothing."""
        return values.index_select(0, self.rows.flatten()).view(*self.rows.shape, *values.shape[1:])


def rows_of_nodes(batch: ForwardBatch, nodes: torch.Tensor) -> torch.Tensor:
    """Rows of nodes int64 ``[R, n]`` that count from each request's root; of one past its rows, any row."""
    return (batch.q_indptr[:-1, None] + nodes).clamp(max=batch.num_rows - 1)


class RaggedRows:
    """Writes a ragged batch's rows: `q_indptr`, positions, and the tail of a tree.

    The tail is written for all nodes of all requests by the backend's own `write_tail`, beside the batch, and the rows
    that there are take theirs from it: one launch and a gather each, and no operation of its own for a plugin to serve.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._beside = BatchBuffers(replace(geometry, modes=(Mode.VERIFY,), forms=()), device)

    def write(self, batch: ForwardBatch, trees: Admitted, ops: TreeOps) -> PlacedRows:
        """Fill the batch, whose prefix lengths and page table are filled, for trees of `batch.padded_reqs` requests."""
        size, nodes = trees.tokens.shape
        batch.q_indptr[1:].copy_(trees.q_lens.cumsum(0))
        row = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request = torch.searchsorted(batch.q_indptr, row, right=True) - 1
        owned = row < batch.q_indptr[-1]
        request = torch.where(owned, request, 0)
        node = torch.where(owned, row - batch.q_indptr[request], 0)
        slot = torch.arange(nodes, device=batch.device).expand(size, -1)
        placed = PlacedRows(request, request * nodes + node, rows_of_nodes(batch, slot))
        whole = self._whole(batch)
        ops.write_tail(whole, trees.parents)
        batch.positions.copy_(placed.of_nodes(whole.positions))
        if isinstance(batch.tail, Tree) and isinstance(whole.tail, Tree):
            batch.tail.mask.copy_(placed.of_nodes(whole.tail.mask))
            batch.tail.depth.copy_(placed.of_nodes(whole.tail.depth))
        return placed

    def _whole(self, batch: ForwardBatch) -> ForwardBatch:
        """The same requests with all D nodes each, over tensors of its own."""
        tree = isinstance(batch.tail, Tree)
        whole = self._beside.uniform(Mode.VERIFY, 0, batch.padded_reqs, batch.num_reqs, batch.host, tree=tree)
        return replace(whole, prefix_lens=batch.prefix_lens, page_table=batch.page_table)
