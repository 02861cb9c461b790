"""Mapping between the rows of a RAGGED_VERIFY batch and the nodes of its draft trees.

The whole mapping runs on the device and can be captured.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import BatchBuffers, ForwardBatch, Tree, TreeOps


class Admitted(NamedTuple):
    """Trees that contain only admitted nodes, packed to the front.

    Attributes:
        tokens: int64 ``[R, D]``; -1 past a request's rows.
        parents: int64 ``[R, D]``; -1 for the root, 0 past a request's rows.
        q_lens: int64 ``[R]``, number of rows of each request; 0 for padding requests.
        nodes: int64 ``[R, D]``, original index of each node.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    q_lens: torch.Tensor
    nodes: torch.Tensor


class PlacedRows(NamedTuple):
    """Maps rows to nodes and nodes to rows, for R requests with trees of D nodes.

    Attributes:
        requests: int64 ``[rows]``, batch entry of each row; 0 for padding rows.
        nodes: int64 ``[rows]``, index of each row's node in ``[R · D]``; 0 (the root of entry 0) for padding rows.
        rows: int64 ``[R, D]``, row of each node; an arbitrary valid row for an unused node.
    """

    requests: torch.Tensor
    nodes: torch.Tensor
    rows: torch.Tensor

    def of_nodes(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values by node, ``[R, D, …]`` or ``[R · D, …]``, into row order ``[rows, …]``."""
        flat = values if len(values) == self.rows.numel() else values.flatten(0, 1)
        return flat.index_select(0, self.nodes)

    def by_node(self, values: torch.Tensor) -> torch.Tensor:
        """Gather values by row, ``[rows, …]``, into node order ``[R, D, …]``; unused nodes are undefined."""
        return values.index_select(0, self.rows.flatten()).view(*self.rows.shape, *values.shape[1:])


def rows_of_nodes(batch: ForwardBatch, nodes: torch.Tensor) -> torch.Tensor:
    """Return the row of each node.

    Args:
        nodes: int64 ``[R, n]``, counted from each request's root. A node past its request's rows gets any valid row.
    """
    return (batch.q_indptr[:-1, None] + nodes).clamp(max=batch.num_rows - 1)


class RaggedRows:
    """Writes `q_indptr`, positions and the tail (mask and depths of the draft trees) of a ragged batch.

    The backend's own `write_tail` writes the tail of all D nodes of every request into a separate uniform batch.
    The ragged rows are gathered from that batch. So a plugin needs no extra operation for ragged trees.
    """

    def __init__(self, geometry: Geometry, device: torch.device) -> None:
        self._uniform_buffers = BatchBuffers(replace(geometry, modes=(Mode.VERIFY,), forms=()), device)

    def write(self, batch: ForwardBatch, trees: Admitted, ops: TreeOps) -> PlacedRows:
        """Fill the batch with the rows of `trees`. Its prefix lengths and page table must be filled already."""
        size, nodes = trees.tokens.shape
        batch.q_indptr[1:].copy_(trees.q_lens.cumsum(0))
        row = torch.arange(batch.num_rows, dtype=torch.int32, device=batch.device)
        request = torch.searchsorted(batch.q_indptr, row, right=True) - 1
        owned = row < batch.q_indptr[-1]
        request = torch.where(owned, request, 0)
        node = torch.where(owned, row - batch.q_indptr[request], 0)
        slot = torch.arange(nodes, device=batch.device).expand(size, -1)
        placed = PlacedRows(request, request * nodes + node, rows_of_nodes(batch, slot))
        full = self._all_nodes(batch)
        ops.write_tail(full, trees.parents)
        batch.positions.copy_(placed.of_nodes(full.positions))
        if isinstance(batch.tail, Tree) and isinstance(full.tail, Tree):
            batch.tail.mask.copy_(placed.of_nodes(full.tail.mask))
            batch.tail.depth.copy_(placed.of_nodes(full.tail.depth))
            if batch.tail.parents is not None:
                batch.tail.parents.copy_(placed.of_nodes(trees.parents.flatten()))
        return placed

    def _all_nodes(self, batch: ForwardBatch) -> ForwardBatch:
        """Return a VERIFY batch of the same requests, with all D nodes of each and separate tensors."""
        tree = isinstance(batch.tail, Tree)
        full = self._uniform_buffers.uniform(Mode.VERIFY, 0, batch.padded_reqs, batch.num_reqs, batch.host, tree=tree)
        return replace(full, prefix_lens=batch.prefix_lens, page_table=batch.page_table)
