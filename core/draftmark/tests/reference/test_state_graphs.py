"""Tests that graphs record recurrent layers: one capture is right for other requests, slots, trees and counts."""

from __future__ import annotations

import pytest
import torch
from reference.state_rig import SHAPES, StateRig
from reference.test_state import path_to, random_tree

from draftmark import Mode
from draftmark.runtime import GraphKey, Program, VerifyResult, graph_state_for, write_tail
from draftmark_reference import Rollback


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("rollback", list(Rollback))
def test_a_replayed_round_equals_an_eager_one(shape, rollback) -> None:
    """Verify and commit of a captured graph leave the outputs and the pool of an eager round, with swapped slots."""
    rigs = [StateRig(shape, rollback, layers=2, interval=4, seed=1) for _ in range(2)]
    for rig in rigs:
        rig.start(0, 1, 2)
        rig.extend({0: 3, 1: 6})
        for row in (0, 1, 2):
            rig.slots.lend(row)
    nodes = rigs[0].geometry.draft.num_draft_tokens
    rounds = [
        ([0, 1, 2], [random_tree(nodes, seed) for seed in (1, 2, 3)], [5, 3, -1]),
        ([2, 0], [random_tree(nodes, seed) for seed in (4, 5)], [0, 5]),
        ([1], [list(range(-1, nodes - 1))], [5]),
    ]
    eager, replayed = _Round(rigs[0]), _Round(rigs[1])
    state = graph_state_for(torch.device("cpu"))
    key = GraphKey(Program.VERIFY, 4)
    replayed.fill([0], [random_tree(nodes, 9)], [0])
    replayed.batch_slots(null=True)
    before = rigs[1].pool.state.clone(), rigs[1].pool.conv.clone()
    state.capture(key, replayed.run)
    for old, now in zip(before, (rigs[1].pool.state, rigs[1].pool.conv), strict=True):
        assert torch.equal(old[:, 1:].nan_to_num(), now[:, 1:].nan_to_num()), "capture wrote a slot of a request"
    for rows, trees, leaves in rounds:
        for one in (eager, replayed):
            one.fill(rows, trees, leaves)
        eager.run()
        state.replay(key)
        for mine, other in zip(eager.results(), replayed.results(), strict=True):
            assert torch.equal(mine.nan_to_num(), other.nan_to_num())


class _Round:
    """A verify round over static tensors."""

    def __init__(self, rig: StateRig) -> None:
        self.rig, s = rig, rig.shape
        self.backend = rig.backend._inner
        self.nodes = rig.geometry.draft.num_draft_tokens
        rows, layers = 4 * self.nodes, rig.layers
        token = rig.token()
        self.inputs = [torch.zeros(layers, rows, *one.shape[1:], dtype=one.dtype) for one in token]
        self.convolved = torch.zeros(layers, rows, s.conv_channels, dtype=torch.float64)
        self.out = torch.zeros(layers, rows, s.num_heads, s.value_dim, dtype=torch.float64)
        self.parents = torch.zeros(4, self.nodes, dtype=torch.int64)
        self.accepted = VerifyResult(*(torch.zeros(*shape, dtype=torch.int64) for shape in ((4, 6), (4,), (4, 6))))
        self.save = torch.zeros(4, dtype=torch.int32)
        self.batch = rig.buffers.uniform(Mode.VERIFY, 0, 4, 4, rig._host([0, 0, 0, 0]), tree=True)
        self.random = torch.Generator()

    def fill(self, rows, trees, leaves) -> None:
        """Write the contents of a round; the inputs depend on its arguments only."""
        rig = self.rig
        self.random.manual_seed(sum(map(sum, trees)))
        index = rig._index(self.batch, rows)
        self.batch.prefix_lens.copy_(rig.lengths.device[index])
        self.batch.state_slots.copy_(rig.slots.device[index])
        self.save.copy_(rig.slots.save[index])
        padding = [[-1] + [0] * (self.nodes - 1)] * (4 - len(rows))
        self.parents.copy_(torch.tensor([*trees, *padding]))
        self.accepted.accept_index.copy_(torch.arange(self.nodes).repeat(4, 1))
        self.accepted.accept_lens.fill_(1)
        for request, (tree, leaf) in enumerate(zip(trees, leaves, strict=True)):
            path = path_to(tree, leaf) if leaf >= 0 else []
            self.accepted.accept_lens[request] = len(path)
            self.accepted.accept_index[request, : len(path)] = torch.tensor(path, dtype=torch.int64)
        for one, like in zip(self.inputs, ("x", "q", "k", "v", "log_decay", "beta"), strict=True):
            drawn = torch.rand(one.shape, generator=self.random, dtype=torch.float64)
            one.copy_(-drawn if like == "log_decay" else drawn - 0.5 * (like != "beta"))
        self.convolved.fill_(float("nan"))
        self.out.fill_(float("nan"))

    def batch_slots(self, *, null: bool) -> None:
        """Point every request at a null slot, as a capture does."""
        if null:
            self.batch.state_slots.zero_()
            self.batch.prefix_lens.zero_()
            self.save.zero_()

    def run(self) -> None:
        """Run tail, layers and commit."""
        rig, s = self.rig, self.rig.shape
        write_tail(self.batch, rig.geometry, self.parents)
        self.backend.write_metadata(self.batch)
        for layer, cache in enumerate(rig.pool.layers):
            x, q, k, v, decay, beta = (one[layer] for one in self.inputs)
            if s.conv_kernel:
                weight, bias = rig.weight[layer], rig.bias[layer]
                self.backend.convolve(x, weight, bias, cache, self.batch, self.convolved[layer])
            if s.num_heads:
                gate = rig.constant[layer] if s.gate == "constant" else decay
                strength = beta if s.recurrence == "delta" else None
                self.backend.recur(q, k, v, gate, strength, cache, self.batch, self.out[layer])
        self.backend.commit(rig.pool, self.batch, self.accepted, self.save)

    def results(self) -> list[torch.Tensor]:
        """Return the outputs, and the slots of requests."""
        nulls = self.rig.pool.null_slots
        slots = [one[:, nulls:] for one in (self.rig.pool.state, self.rig.pool.conv)]
        return [self.convolved, self.out, *slots]
