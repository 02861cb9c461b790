"""Harness of the tree-operation checks: runs the operations on static tensors, and checks the result of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from draftmark.batch import ForwardBatch, Tree
from draftmark.geometry import Geometry
from draftmark.graphs import GraphKey
from draftmark.tree import VerifyResult

from ..backend_under_test import BackendUnderTest
from ..cases.tree_rounds import Round
from ..check import ContractViolation
from ..oracle.history import Request
from ..oracle.verify_tree import verdict
from .graph_harness import no_sync
from .tree_tensors import DIRT, TreeTensors


class TreeHarness:
    """Runs the tree operations that the decode loop uses with a backend. Raises `Refused` if it refuses the geometry.

    Every ``assert_`` method compares the output of `TreeOps` with the result of plain Python for the round.

    Attributes:
        ops: the backend's own operations, or torch's when the backend has none.
        tensors: a round's static tensors and its pool.
    """

    def __init__(
        self, subject: BackendUnderTest, geometry: Geometry, first_page: int = 1, memory: torch.Tensor | None = None
    ) -> None:
        subject.require(geometry)
        geometry = subject.fit(geometry)
        self.subject, self.geometry = subject, geometry
        self.ops = subject.backend.tree_ops(geometry, torch.device(subject.device))
        self.tensors = TreeTensors(geometry, subject.device, first_page, memory)

    def capture(self, key: GraphKey, step: Callable[[], VerifyResult]) -> VerifyResult:
        """Capture a step in a fresh graph state, without a device synchronization."""
        self.state = self.subject.graph_state(self.geometry)
        with no_sync(self.subject.device):
            found: VerifyResult = self.state.capture(key, step)
        return found

    def replay(self, key: GraphKey) -> None:
        """Replay the captured step, without a device synchronization."""
        with no_sync(self.subject.device):
            self.state.replay(key)

    def more_tensors(self, layers: int, kv_heads: int, head_dim: int) -> TreeTensors:
        """Return another set of static tensors, with a KV pool for another group of layers."""
        attention = replace(self.geometry.attention, num_kv_heads=kv_heads, head_dim=head_dim)
        group = replace(self.geometry, attention=attention)
        return TreeTensors(self.geometry, self.subject.device, group=group, layers=layers)

    def verify(self) -> VerifyResult:
        """Run `verify_tree` on the trees that are loaded into the tensors."""
        return self.ops.verify_tree(*self.tensors.trees(), self.tensors.targets)

    def compact(self, paths: list[list[int]]) -> None:
        """Run `compact` on the pool, along one path per request."""
        nodes, device = self.geometry.draft.num_draft_tokens, self.tensors.device
        path = torch.tensor([[*kept, *range(len(kept), nodes)] for kept in paths], device=device)
        counts = torch.tensor([len(kept) for kept in paths], device=device)
        self.ops.compact(self.tensors.pool, self.tensors.batch(), VerifyResult(torch.full_like(path, -1), counts, path))

    # -- assertions about the results of each operation ---------------------------------------------------

    def assert_tail(self, batch: ForwardBatch, requests: list[Request], what: str) -> None:
        """Check that mask, depth and positions follow the parents, and that later elements keep their old values."""
        buffers = self.tensors.buffers
        wall, words = self.geometry.limits.max_context_len - 1, buffers.mask.shape[1]
        rows = [(one, one.own_slot(row)) for one in requests for row in range(one.rows)]
        wanted = {"positions": [min(one.prefix + one.depth(slot), wall) for one, slot in rows]}
        found = {"positions": buffers.positions}
        if isinstance(batch.tail, Tree):
            bits = [sum(1 << seen for seen in one.lineage(slot)) for one, slot in rows]
            wanted["mask"] = [_signed(line >> 32 * word) for line in bits for word in range(words)]
            wanted["depth"] = [one.depth(slot) for one in requests for slot in range(one.tail)]
            found |= {"mask": buffers.mask.view(-1), "depth": buffers.depth}
        for name, values in wanted.items():
            got = found[name].tolist()
            if got[: len(values)] != values:
                at = next(i for i, (a, b) in enumerate(zip(got, values, strict=False)) if a != b)
                shown = "".join(f"\n    {one}" for one in requests)
                raise ContractViolation(
                    f"{what}: {name} is wrong at element {at}", batch=shown, got=got[at], expected=values[at],
                    formula="draftmark.tree.write_tail",
                )  # fmt: skip
            if any(value != DIRT for value in got[len(values) :]):
                raise ContractViolation(
                    f"{what}: {name} was written past the batch", got="a write", expected=f"{len(values)} elements"
                )

    def assert_verdict(self, one: Round, got: VerifyResult, what: str) -> None:
        """Check tokens, counts and path of every request, the padded one included."""
        rows = zip(one.drafts, one.requests, one.targets, strict=True)
        wanted = list(zip(*(verdict(d, r.parents, t) for d, r, t in rows), strict=True))
        for name, tensor, values in zip(("tokens", "counts", "path"), got, wanted, strict=True):
            if tensor.dtype is not torch.int64 or tensor.tolist() != list(values):
                raise ContractViolation(
                    f"{what}: the verdict's {name} are wrong", batch=one, got=f"{tensor.dtype} {tensor.tolist()}",
                    expected=f"torch.int64 {list(values)}", formula="draftmark.tree.verify_tree",
                )  # fmt: skip

    def moved(self, one: Round, paths: list[list[int]]) -> list[torch.Tensor]:
        """Return K and V ``[layers, slots, …]`` of the owned pages as `compact` must leave them."""
        size, first, after = self.geometry.attention.page_size, self.tensors.first_page, []

        def slot(request: Request, node: int) -> int:
            position = request.prefix + node
            return (request.pages[position // size] - first) * size + position % size

        for pages in self.tensors.owned:
            old = pages.flatten(1, 2)
            new = old.clone()
            for request, path in zip(one.requests, paths, strict=True):
                for place, node in enumerate(path if request.live else []):
                    new[:, slot(request, place)] = old[:, slot(request, node)]
            after.append(new)
        return after

    def assert_pool(self, wanted: list[torch.Tensor], one: Round, what: str) -> None:
        """Compare every byte of every page that a request may own with the wanted pool."""
        for name, pages, want in zip("kv", self.tensors.owned, wanted, strict=True):
            differ = (pages.flatten(1, 2) != want).flatten(2).any(2)
            if bool(differ.any()):
                layer, slot = (int(i) for i in differ.nonzero()[0])
                at = slot + self.tensors.first_page * self.geometry.attention.page_size
                raise ContractViolation(
                    f"{what}: {name} of layer {layer} is wrong at slot {at}", batch=one,
                    got=f"{int(differ.sum())} slots with other bytes", formula="draftmark.tree.TreeOps.compact",
                    expected="the KV of the i-th kept node at position L + i, and every other byte as it was",
                )  # fmt: skip


def _signed(word: int) -> int:
    word &= 0xFFFFFFFF
    return word - 2**32 if word >= 2**31 else word
