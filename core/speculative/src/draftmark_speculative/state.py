"""Device state of an engine: lengths, page table, the static inputs of a round, and the runner of captured steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from draftmark import Geometry, StateGeometry
from draftmark.runtime import BatchBuffers, GraphKey, GraphState, SequenceLengths, to_device

from .drafts import DraftTree
from .request import Request

Outputs = TypeVar("Outputs")


class DeviceState:
    """Holds the engine's static device tensors. Rows of requests come first, then null rows (for padding).

    Args:
        states: geometry of the target's layers with recurrent state; None without such layers.

    Attributes:
        lengths: the committed length of every row.
        page_table: int32 ``[2 · max_reqs, max_pages_per_req]``; null rows contain null pages only.
        batch: the static batch tensors of captured forwards.
        rows: int64 ``[max_reqs]``, row of each batch entry.
        pending: int64 ``[2 · max_reqs]``, newest token of every row: the next root. Its KV is not stored yet.
        requests: int64 ``[max_reqs]``, request id of each batch entry, for sampling.
        tokens, parents: int64 ``[max_reqs, D]``, the draft trees. Token -1 marks an unused node. The round writes the
            root's token.
    """

    def __init__(
        self, geometry: Geometry, device: torch.device, unique_slots: bool, states: StateGeometry | None = None
    ) -> None:
        reqs, nodes = geometry.max_reqs, geometry.draft.num_draft_tokens
        self.device = device
        self.lengths = SequenceLengths(reqs, geometry.max_prefix_len, device)
        self.page_table = torch.zeros(2 * reqs, geometry.max_pages_per_req, dtype=torch.int32, device=device)
        if unique_slots:
            pages = geometry.null_pages_per_req
            ids = torch.arange(reqs * pages, dtype=torch.int32, device=device)
            self.page_table[reqs:, :pages] = ids.view(reqs, pages)
        self.batch = BatchBuffers(geometry, device, states)
        self._null_rows = torch.arange(reqs, 2 * reqs, device=device)
        self.rows = self._null_rows.clone()
        self.pending = torch.zeros(2 * reqs, dtype=torch.int64, device=device)
        self.requests = torch.zeros(reqs, dtype=torch.int64, device=device)
        self.tokens = torch.full((reqs, nodes), -1, dtype=torch.int64, device=device)
        self.parents = torch.zeros(reqs, nodes, dtype=torch.int64, device=device)
        self.parents[:, 0] = -1

    def assign_row(self, request: Request, first_new_page: int) -> None:
        """Write the request's pages from `first_new_page` on into its row of the page table."""
        if new := request.pages[first_new_page:]:
            pages = to_device(new, self.device, torch.int32)
            self.page_table[request.row, first_new_page : len(request.pages)].copy_(pages)

    def resume(self, row: int, count: int) -> None:
        """Set the length of a fresh row to `count` tokens, on device and host: its pages hold their KV already."""
        self.lengths.dispatched([row], count)
        self.lengths.settle([row], [count], count)
        rows, counts = to_device([[row], [count]], self.device)
        self.lengths.advance(rows, counts)

    def fill(self, requests: Sequence[Request], padded: int) -> None:
        """Set the batch entries of the next round: `requests` first, then null rows up to `padded`."""
        live = len(requests)
        self.rows[live:padded].copy_(self._null_rows[live:padded])
        if live:
            ids = to_device([[request.row for request in requests], [request.id for request in requests]], self.device)
            self.rows[:live].copy_(ids[0])
            self.requests[:live].copy_(ids[1])

    def set_draft_trees(self, trees: Sequence[DraftTree], padded: int) -> None:
        """Write draft trees from the host for the requests of the last `fill`."""
        nodes, padding = self.tokens.shape[1], [DraftTree([-1])] * (padded - len(trees))
        rest = [nodes - len(tree) for tree in (*trees, *padding)]
        tokens = [tree.tokens + [-1] * n for tree, n in zip((*trees, *padding), rest, strict=True)]
        parents = [tree.parents + [0] * n for tree, n in zip((*trees, *padding), rest, strict=True)]
        self.tokens[:padded].copy_(to_device(tokens, self.device))
        self.parents[:padded].copy_(to_device(parents, self.device))

    def set_draft_tokens(self, padded: int, tokens: torch.Tensor, parents: torch.Tensor) -> None:
        """Write draft tokens below the root on the device: int64 ``[padded, n]``, n < D. Capturable.

        Unused nodes become children of the root with token -1, which matches no target token.
        """
        count = tokens.shape[1]
        self.tokens[:padded, 1 : count + 1].copy_(tokens)
        self.parents[:padded, 1 : count + 1].copy_(parents)
        self.tokens[:padded, count + 1 :].fill_(-1)
        self.parents[:padded, count + 1 :].fill_(0)


class GraphRunner:
    """Runner of device steps: replays a step's graph, or runs the step eagerly if none was captured.

    Args:
        graphs: the backend's graph state; None runs every step eagerly.
    """

    def __init__(self, graphs: GraphState | None) -> None:
        self.graphs = graphs
        self._captured: set[GraphKey] = set()

    def capture(self, key: GraphKey, step: Callable[[], Outputs]) -> None:
        """Capture `step`. The graph owns the step's outputs."""
        assert self.graphs is not None, "only a graph state captures"
        self.graphs.capture(key, step)
        self._captured.add(key)

    def run(self, key: GraphKey, step: Callable[[], Outputs]) -> Outputs:
        """Run the step and return its outputs, which are valid until the next run of any key."""
        if self.graphs is None or key not in self._captured:
            return step()  # a batch larger than the largest graph runs eagerly
        outputs: Outputs = self.graphs.replay(key)
        return outputs
