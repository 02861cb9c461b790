"""Requests with recurrent layers: batches for a backend, and the outputs of a plain float64 loop over tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch

from draftmark import DraftShape, Gate, Limits, Mode, Recurrence, StateGeometry, StateShape
from draftmark.loaded import LoadedBackend
from draftmark.runtime import (
    BatchBuffers,
    Exact,
    ForwardBatch,
    SequenceLengths,
    StatePool,
    Tree,
    VerifyResult,
    ragged,
    write_tail,
)
from draftmark.tree import ancestors, depths, pack_bits
from draftmark_reference import ReferencePlugin, Rollback
from draftmark_speculative.slots import StateSlots

SHAPES = {
    "delta, head": StateShape(Recurrence.DELTA, Gate.HEAD, 4, 2, 5, 3, 32, 4, "float64", "float64", "float64"),
    "delta, key": StateShape(Recurrence.DELTA, Gate.KEY, 2, 2, 5, 3, 26, 4, "float64", "float64", "float64"),
    "decay, head": StateShape(Recurrence.DECAY, Gate.HEAD, 4, 1, 5, 3, 22, 3, "float64", "float64", "float64"),
    "decay, key": StateShape(Recurrence.DECAY, Gate.KEY, 6, 1, 5, 1, 6, 4, "float64", "float64", "float64"),
    "decay, constant": StateShape(Recurrence.DECAY, Gate.CONSTANT, 2, 2, 5, 3, 0, 0, "float64", "float64", "float64"),
    "convolution": StateShape(
        Recurrence.NONE, Gate.HEAD, 0, 0, 0, 0, 7, 3, "float64", "float64", "float64", conv_silu=False
    ),
}
"""One layer shape for each recurrence and gate, in float64."""


class Token(NamedTuple):
    """Inputs of one row in each layer; tensors without a row dimension."""

    x: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor


def outputs_of(tokens: list[Token], rig: StateRig, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the convolution and the recurrence's output of the last token, computed token by token."""
    s, taps = rig.shape, rig.shape.conv_kernel
    conv = rig.bias[layer].clone() if taps else torch.zeros(0, dtype=torch.float64)
    for tap in range(taps):
        at = len(tokens) - 1 - tap
        if at >= 0:
            conv = conv + rig.weight[layer][:, taps - 1 - tap] * tokens[at].x[layer]
    if s.conv_silu:
        conv = conv * torch.sigmoid(conv)
    out = torch.zeros(s.num_heads, s.value_dim, dtype=torch.float64)
    for head in range(s.num_heads):
        key, state = head // s.heads_per_key, torch.zeros(s.value_dim, s.key_dim, dtype=torch.float64)
        for one in tokens:
            log_decay = rig.constant[layer] if s.gate is Gate.CONSTANT else one.log_decay[layer]
            state = state * torch.exp(log_decay[head])  # a number, or one per key element: columns
            write = one.v[layer][head]
            if s.recurrence is Recurrence.DELTA:
                write = one.beta[layer][head] * (write - state @ one.k[layer][key])
            state = state + torch.outer(write, one.k[layer][key])
        out[head] = state @ tokens[-1].q[layer][key]
    return conv, out


class StateRig:
    """Three requests on one backend, with their tokens; every forward compares its outputs with the loop.

    Attributes:
        histories: committed tokens of each request row.
        tolerance: largest difference to the loop, relative to 1.
    """

    def __init__(
        self,
        shape: StateShape,
        rollback: Rollback = Rollback.REPLAY,
        *,
        nodes: int = 6,
        interval: int = 0,
        seed: int = 0,
        layers: int = 2,
        unique: bool = False,
    ) -> None:
        self.shape, self.layers = shape, layers
        limits = Limits(3, 4096, 256, capture_batch_sizes=(4,), row_budgets=(16, 200), state_interval=interval)
        self.geometry = StateGeometry.create(shape, limits, DraftShape(2, 3, nodes), num_layers=layers)
        self.backend = LoadedBackend("reference", ReferencePlugin(rollback)).open_state(
            self.geometry, "cpu", guard=True
        )
        nulls = self.geometry.null_slots(unique)
        self.pool = StatePool(self.geometry, nulls + 7, nulls, "cpu")
        self.pool.state.fill_(float("nan"))
        self.pool.conv.fill_(float("nan"))
        self.slots = StateSlots(4, [self.pool])
        self.lengths = SequenceLengths(4, self.geometry.max_prefix_len, "cpu")
        self.buffers = BatchBuffers(self.geometry, "cpu")
        self.random = torch.Generator().manual_seed(seed)
        self.weight = self._draw(layers, shape.conv_channels, max(1, shape.conv_kernel))
        self.bias = self._draw(layers, shape.conv_channels)
        self.constant = -self._draw(layers, shape.num_heads).abs()
        self.histories: dict[int, list[Token]] = {}
        self.worst = 0.0

    def start(self, *rows: int) -> None:
        """Give each request row a slot and an empty history."""
        for row in rows:
            self.slots.take(row)
            self.histories[row] = []

    def stop(self, row: int) -> None:
        """End a request."""
        self.slots.give_back(row)
        self.lengths.reset(row)
        del self.histories[row]

    # -- forwards -----------------------------------------------------------------------------------------

    def extend(self, chunks: dict[int, int]) -> None:
        """Run a prompt chunk of each request and commit it."""
        rows, counts = list(chunks), tuple(chunks.values())
        tokens = {row: [self.token() for _ in range(n)] for row, n in chunks.items()}
        index = torch.tensor(rows)
        table = torch.zeros(len(rows), 0, dtype=torch.int32)
        prefix, own = self.lengths.device[index], self.slots.device[index]
        batch = ragged(self.geometry, prefix, table, counts, self._host(rows), state_slots=own)
        flat = [(row, self.histories[row] + tokens[row][: i + 1]) for row in rows for i in range(len(tokens[row]))]
        self.forward(batch, [one for row in rows for one in tokens[row]], flat)
        self.backend.commit(self.pool, batch, None, self.slots.save[index])
        self._advance(batch, rows, dict(zip(rows, counts, strict=True)), tokens)

    def decode(self, rows: list[int]) -> None:
        """Run one token of each request and commit it."""
        batch = self._uniform(Mode.DECODE, rows, tree=False)
        write_tail(batch, self.geometry)
        tokens = {row: [self.token()] for row in rows}
        self.forward(
            batch, self._padded(batch, rows, tokens), [(row, self.histories[row] + tokens[row]) for row in rows]
        )
        self.backend.commit(self.pool, batch, None, self._save(batch, rows))
        self._advance(batch, rows, dict.fromkeys(rows, 1), tokens)

    def verify(self, trees: dict[int, list[int]], paths: dict[int, list[int]], *, chain: bool = False) -> ForwardBatch:
        """Verify one tree of D nodes per request, given as parents, and commit one path of each."""
        rows = list(trees)
        batch = self._uniform(Mode.VERIFY, rows, tree=not chain)
        nodes = self.geometry.draft.num_draft_tokens
        parents = torch.tensor([*trees.values(), *[[-1] + [0] * (nodes - 1)] * (batch.padded_reqs - len(rows))])
        write_tail(batch, self.geometry, parents)
        tokens = {row: [self.token() for _ in range(nodes)] for row in rows}
        expected = [(row, self._path(row, tokens, trees[row], node)) for row in rows for node in range(nodes)]
        self.forward(batch, self._padded(batch, rows, tokens), expected)
        self._commit(batch, rows, paths, tokens)
        return batch

    def ragged_verify(
        self, trees: dict[int, list[int]], paths: dict[int, list[int]], *, budget: int = 16, chain: bool = False
    ) -> ForwardBatch:
        """Verify trees of different sizes, and commit one path of each."""
        rows = list(trees)
        counts = [len(parents) for parents in trees.values()]
        batch = self.buffers.ragged_verify(budget, len(rows), self._host(rows), tree=not chain, padded_reqs=4)
        index = self._index(batch, rows)
        batch.prefix_lens.copy_(self.lengths.device[index])
        batch.state_slots.copy_(self.slots.device[index])
        starts = torch.tensor([0, *counts, *[0] * (4 - len(rows))]).cumsum(0)
        batch.q_indptr.copy_(starts)
        batch.positions.fill_(7)
        at = 0
        for row, parents in trees.items():
            reach = ancestors(torch.tensor([parents], dtype=torch.int64)) if parents else None
            span = slice(at, at + len(parents))
            if reach is not None:
                batch.positions[span] = len(self.histories[row]) + depths(reach)[0]
                if isinstance(batch.tail, Tree):
                    batch.tail.mask[:] = torch.where(torch.arange(budget)[:, None] >= at, -1, batch.tail.mask)
                    batch.tail.mask[span] = pack_bits(reach[0], self.geometry.mask_words)
                    batch.tail.depth[span] = depths(reach)[0]
                    batch.tail.parents[at:] = 99  # stale entries after the live rows
                    batch.tail.parents[span] = torch.tensor(parents, dtype=torch.int32)
            at += len(parents)
        tokens = {row: [self.token() for _ in parents] for row, parents in trees.items()}
        flat = [one for row in rows for one in tokens[row]]
        expected = [(row, self._path(row, tokens, trees[row], node)) for row in rows for node in range(len(trees[row]))]
        poison = Token(*(torch.full_like(one, float("nan")) for one in self.token()))
        self.forward(batch, flat + [poison] * (budget - len(flat)), expected)
        self._commit(batch, rows, paths, tokens)
        return batch

    def forward(self, batch: ForwardBatch, tokens: list[Token], expected: list[tuple[int, list[Token]]]) -> None:
        """Run all layers over poisoned outputs, and compare the leading rows with the loop."""
        s = self.shape
        self.backend.plan(batch)
        self.backend.write_metadata(batch)
        for layer, cache in enumerate(self.pool.layers):
            inputs = [torch.stack([one[i][layer] for one in tokens]) for i in range(6)]
            conv = torch.full_like(inputs[0], float("nan"))
            out = torch.full_like(inputs[3], float("nan"))
            if s.conv_kernel:
                self.backend.convolve(inputs[0], self.weight[layer], self.bias[layer], cache, batch, conv)
            if s.recurrence is not Recurrence.NONE:
                decay = self.constant[layer] if s.gate is Gate.CONSTANT else inputs[4]
                beta = inputs[5] if s.recurrence is Recurrence.DELTA else None
                self.backend.recur(*inputs[1:4], decay, beta, cache, batch, out)
            for row, (request, history) in enumerate(expected):
                found = outputs_of(history, self, layer)
                for name, got, want in (("convolution", conv[row], found[0]), ("output", out[row], found[1])):
                    if want.numel() and (name == "output" or s.conv_kernel):
                        error = float((got - want).abs().max() / max(1.0, float(want.abs().max())))
                        assert error <= 1e-12, f"{name} of row {row}, request {request}, layer {layer}: {error}"
                        self.worst = max(self.worst, error)
            if s.conv_kernel:
                assert conv.isfinite().all(), "a padding row is not finite"
            assert out.isfinite().all(), "a padding row is not finite"

    def token(self) -> Token:
        """Draw the inputs of one row."""
        s, n = self.shape, self.layers
        keys, decays = (n, s.num_key_heads, s.key_dim), (n, s.num_heads, *[s.key_dim] * (s.gate is Gate.KEY))
        unit = torch.nn.functional.normalize(self._draw(*keys), dim=-1)
        decay = -self._draw(*decays).abs()
        return Token(
            self._draw(n, s.conv_channels),
            self._draw(*keys),
            unit,
            self._draw(n, s.num_heads, s.value_dim),
            decay,
            torch.sigmoid(self._draw(n, s.num_heads)),
        )

    # -- helpers ------------------------------------------------------------------------------------------

    def _draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random, dtype=torch.float64)

    def _host(self, rows: list[int]) -> Exact:
        return Exact(tuple(len(self.histories[row]) for row in rows))

    def _index(self, batch: ForwardBatch, rows: list[int]) -> torch.Tensor:
        first = self.lengths.first_null_row
        return torch.tensor([*rows, *range(first + len(rows), first + batch.padded_reqs)])

    def _save(self, batch: ForwardBatch, rows: list[int]) -> torch.Tensor:
        return self.slots.save[self._index(batch, rows)]

    def _uniform(self, mode: Mode, rows: list[int], *, tree: bool) -> ForwardBatch:
        batch = self.buffers.uniform(mode, 0, 4, len(rows), self._host(rows), tree=tree)
        index = self._index(batch, rows)
        batch.prefix_lens.copy_(self.lengths.device[index])
        batch.state_slots.copy_(self.slots.device[index])
        return batch

    def _padded(self, batch: ForwardBatch, rows: list[int], tokens: dict[int, list[Token]]) -> list[Token]:
        flat = [one for row in rows for one in tokens[row]]
        return flat + [self.token() for _ in range(batch.num_rows - len(flat))]

    def _path(self, row: int, tokens: dict[int, list[Token]], parents: list[int], node: int) -> list[Token]:
        path: list[int] = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        return self.histories[row] + [tokens[row][one] for one in path]

    def _commit(
        self, batch: ForwardBatch, rows: list[int], paths: dict[int, list[int]], tokens: dict[int, list[Token]]
    ) -> None:
        nodes = self.geometry.draft.num_draft_tokens
        steps = torch.arange(nodes).repeat(batch.padded_reqs, 1)
        counts = torch.ones(batch.padded_reqs, dtype=torch.int64)
        for request, row in enumerate(rows):
            steps[request, : len(paths[row])] = torch.tensor(paths[row], dtype=torch.int64)
            counts[request] = len(paths[row])
        accepted = VerifyResult(torch.full_like(steps, -1), counts, steps)
        self.backend.commit(self.pool, batch, accepted, self._save(batch, rows))
        kept = {row: [tokens[row][node] for node in paths[row]] for row in rows}
        self._advance(batch, rows, {row: len(kept[row]) for row in rows}, kept)

    def _advance(
        self, batch: ForwardBatch, rows: list[int], counts: dict[int, int], tokens: dict[int, list[Token]]
    ) -> None:
        by = torch.tensor([counts[row] for row in rows])
        self.lengths.advance(torch.tensor(rows), by)
        self.lengths.dispatched(rows, int(by.max()))
        self.lengths.settle(rows, by.tolist(), int(by.max()))
        for row in rows:
            self.histories[row] += tokens[row]
