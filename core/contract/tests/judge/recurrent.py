"""A correct layer with recurrent state in plain torch, and defects of it that public bugs had."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional

from draftmark_contract.judge.states.driver import Kind, Round, StateCapabilities
from draftmark_contract.judge.states.layer import Family, Layer, Rows, Weights, layer_of
from draftmark_contract.judge.states.questions import CHUNKS, COMMIT, FRESH, LEAVES, PADDING, PARENTS, ROUNDS

GARBAGE = 100.0
LAYERS = [
    layer_of("gdn", Family.GDN, (4, 2), (8, 6), "float32"),
    layer_of("kda", Family.KDA, (2, 2), (8, 8), "float32"),
    layer_of("mamba2", Family.MAMBA2, (4, 1), (8, 6), "float32", conv_bias=True),
]


class PlainStates:
    """Keeps one slot for each request, and a snapshot of every row of a verify until the commit."""

    def __init__(self, layer: Layer, weights: Weights, drafts: int, requests: int) -> None:
        self.layer, self.weights, self.drafts, shape = layer, weights, drafts, layer.shape
        self.states = torch.full((2 * requests, shape.num_heads, shape.value_dim, shape.key_dim), GARBAGE)
        self.windows = torch.full((2 * requests, shape.conv_channels, layer.window), GARBAGE)
        self.snapshots: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def start(self, request: int) -> None:
        """Zero the slot."""
        self.states[request], self.windows[request] = 0, 0

    def run(self, one: Round, rows: Rows) -> torch.Tensor:
        """Run one request after another."""
        outs, start = [], 0
        for part in one.parts:
            held = self.begin(part.request, part.kind), self.windows[part.request].clone()
            kept: list[tuple[torch.Tensor, torch.Tensor]] = []
            for row, parent in enumerate(self.parents(part.parents)):
                state, window = kept[parent] if parent >= 0 else held
                out, *after = self._row(state, window, rows.part(start + row, start + row + 1))
                kept.append((after[0], after[1]))
                outs.append(out)
            start += part.rows
            if part.kind is Kind.VERIFY:
                self.snapshots[part.request] = kept
            else:
                self.write(part.request, kept[-1])
        return torch.stack(outs)

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Copy the leaf's snapshot to the slot."""
        for request, path in paths.items():
            self.write(request, self.snapshots.pop(request)[self.leaf(path)])

    def state(self, request: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of the slot."""
        return self.states[request].clone(), self.windows[request].clone()

    def others(self, requests: Sequence[int]) -> torch.Tensor:
        """Return the other slots."""
        kept = [slot for slot in range(len(self.states)) if slot not in requests]
        return torch.cat([self.states[kept].flatten(), self.windows[kept].flatten()]).view(torch.uint8)

    # -- what the defects change ------------------------------------------------------------------------

    def begin(self, request: int, kind: Kind) -> torch.Tensor:
        """Return the state that a forward starts from."""
        return self.states[request].clone()

    def parents(self, parents: Sequence[int]) -> Sequence[int]:
        """Return the parent of each row."""
        return parents

    def leaf(self, path: Sequence[int]) -> int:
        """Return the row of the committed snapshot."""
        return path[-1]

    def write(self, request: int, after: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write the slot."""
        self.states[request], self.windows[request] = after

    def _row(self, state: torch.Tensor, window: torch.Tensor, row: Rows) -> tuple[torch.Tensor, ...]:
        shape, weights = self.layer.shape, self.weights
        taps = torch.cat([window, row.x[0][:, None]], 1)
        bias = 0 if weights.bias is None else weights.bias
        first, second, third = functional.silu((taps * weights.conv).sum(1) + bias).split(self.layer.widths)
        step = functional.softplus(row.gate[0] + weights.dt_bias)
        mamba = self.layer.family is Family.MAMBA2
        q, k = (third, second) if mamba else (first, second)
        q, k = (one.view(shape.num_key_heads, -1).repeat_interleave(shape.heads_per_key, 0) for one in (q, k))
        v = (first if mamba else third).view(shape.num_heads, -1)
        rate = -weights.a_log.exp().view(-1, *[1] * (step.dim() - 1))
        faded = state * (step * rate).exp().view(shape.num_heads, 1, -1)
        if mamba:
            after = faded + (step[:, None] * v)[:, :, None] * k[:, None]
            return torch.einsum("hvk,hk->hv", after, q) + v * weights.skip[:, None], after, taps[:, 1:]
        q, k = functional.normalize(q, dim=-1) * shape.key_dim**-0.5, functional.normalize(k, dim=-1)
        u = row.b[0].sigmoid()[:, None] * (v - torch.einsum("hvk,hk->hv", faded, k))
        after = faded + u[:, :, None] * k[:, None]
        return torch.einsum("hvk,hk->hv", after, q), after, taps[:, 1:]


class TreeAsChain(PlainStates):
    """Each row follows the row before it (sglang#27463)."""

    def parents(self, parents: Sequence[int]) -> Sequence[int]:
        """Return a chain's parents."""
        return range(-1, len(parents) - 1)


class LeafByCount(PlainStates):
    """The committed row is the number of accepted rows less one (sglang#27463)."""

    def leaf(self, path: Sequence[int]) -> int:
        """Return the count less one."""
        return len(path) - 1


class Clamped(PlainStates):
    """The accepted count is clamped to the window's rows (xllm#2247)."""

    def leaf(self, path: Sequence[int]) -> int:
        """Return at most the third row of the path."""
        return path[:3][-1]


class NeverCommits(PlainStates):
    """A verify of fewer rows than the largest one is never committed (sglang#26351)."""

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Commit only full verifies."""
        super().commit({one: path for one, path in paths.items() if len(self.snapshots[one]) == self.drafts})


class WindowStays(PlainStates):
    """The window is not taken back: it ends at the last row, not at the accepted one (mlx-swift-lm#218)."""

    def commit(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Commit the leaf's state and the last row's window."""
        for request, path in paths.items():
            rows = self.snapshots.pop(request)
            self.write(request, (rows[path[-1]][0], rows[-1][1]))


class VerifyWrites(PlainStates):
    """A verify leaves its last state in the slot."""

    def run(self, one: Round, rows: Rows) -> torch.Tensor:
        """Write the slots too."""
        out = super().run(one, rows)
        for part in one.parts:
            if part.kind is Kind.VERIFY:
                self.states[part.request] = self.snapshots[part.request][-1][0]
        return out


class Recycled(PlainStates):
    """A new request starts from the state of the slot's previous owner (vllm#51483)."""

    def start(self, request: int) -> None:
        """Zero the window only."""
        self.windows[request] = 0


class ChunksForget(PlainStates):
    """Every chunk of a prompt starts from zeros."""

    def begin(self, request: int, kind: Kind) -> torch.Tensor:
        """Return zeros for a chunk."""
        state = super().begin(request, kind)
        return torch.zeros_like(state) if kind is Kind.PREFILL else state


class PaddingWrites(PlainStates):
    """A padding request writes the last slot (tokenspeed#700)."""

    def run(self, one: Round, rows: Rows) -> torch.Tensor:
        """Write the last slot if the round has padding."""
        if one.padding:
            self.states[-1] = 0
        return super().run(one, rows)


DEFECTS = {
    TreeAsChain: (PARENTS, "gdn-tree-fork"),
    LeafByCount: (COMMIT, "mamba2-tree-comb"),
    Clamped: (COMMIT, "kda-chain4-accept4"),
    WindowStays: (COMMIT, "gdn-chain4-accept1"),
    VerifyWrites: (LEAVES, "gdn-chain4"),
    NeverCommits: (ROUNDS, "gdn-rows2-after-accept1"),
    Recycled: (FRESH, "mamba2-prompt1"),
    ChunksForget: (CHUNKS, "gdn-7+6"),
    PaddingWrites: (PADDING, "kda-verify-pad1"),
}
"""Defect → rule and case of an item that finds it."""


def caps(driver: type[PlainStates] = PlainStates) -> StateCapabilities:
    """Return a plain layer that serves everything."""

    def opened(layer: Layer, weights: Weights, drafts: int, requests: int) -> PlainStates:
        return driver(layer, weights, drafts, requests)

    return StateCapabilities(open=opened, layers=LAYERS, trees=True, decodes=True, mixed=True, read_only=True)
