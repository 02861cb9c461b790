"""Tests of the reference's recurrent layers against a plain float64 loop over each request's tokens."""

from __future__ import annotations

import random

import pytest
import torch
from reference.state_rig import SHAPES, StateRig

from draftmark_reference import Rollback

EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
BOTH = pytest.mark.parametrize("rollback", list(Rollback))


def random_tree(nodes: int, seed: int) -> list[int]:
    """Return the parents of a random tree with one root."""
    draw = random.Random(seed)
    return [-1, *(draw.randrange(node) for node in range(1, nodes))]


def path_to(parents: list[int], node: int) -> list[int]:
    """Return the nodes from the root to a node."""
    return [node] if parents[node] < 0 else [*path_to(parents, parents[node]), node]


@EACH
@BOTH
def test_rounds_equal_the_loop_over_tokens(shape, rollback, monkeypatch) -> None:
    """Prefill in chunks, decode, trees, chains and ragged rounds give the loop's outputs after every commit."""
    monkeypatch.setattr("draftmark_reference.state.backend.CHUNK", 4)
    rig = StateRig(shape, rollback)
    rig.start(0, 1, 2)
    rig.extend({0: 9, 1: 1})
    rig.extend({1: 3, 0: 4})
    for seed in range(2):
        trees = {row: random_tree(6, seed * 3 + row) for row in (0, 1, 2)}
        rig.verify(trees, {0: path_to(trees[0], 5), 1: path_to(trees[1], 2), 2: []})
        rig.decode([1, 0])
        sizes = {2: random_tree(5, seed), 0: [], 1: random_tree(1 + seed, seed)}
        rig.ragged_verify(sizes, {2: path_to(sizes[2], 4), 0: [], 1: path_to(sizes[1], seed)})
        chain = list(range(-1, 5))
        rig.verify({0: chain, 1: chain}, {0: [0, 1, 2], 1: list(range(6))}, chain=True)
        chains = {1: list(range(-1, seed)), 0: list(range(-1, 3))}
        rig.ragged_verify(chains, {1: [0], 0: [0, 1]}, chain=True)
    assert rig.worst < 1e-13


def test_a_long_prompt_equals_the_loop_over_tokens() -> None:
    """A prompt of more than one chunk of 64 rows gives the loop's outputs and state."""
    rig = StateRig(SHAPES["delta, head"], layers=1)
    rig.start(0)
    rig.extend({0: 70})
    rig.decode([0])


@pytest.mark.parametrize("nodes", [1, 33, 64])
@pytest.mark.parametrize("shape", [SHAPES["delta, head"], SHAPES["delta, key"], SHAPES["decay, head"]])
@BOTH
def test_large_trees_equal_the_loop_over_tokens(shape, rollback, nodes) -> None:
    """Trees up to 64 rows, a chain included, give the loop's outputs, and the deepest leaf is committed."""
    rig = StateRig(shape, rollback, nodes=nodes, layers=1)
    rig.start(0, 1, 2)
    rig.extend({0: 5})
    chain = list(range(-1, nodes - 1))
    trees = {0: chain, 1: random_tree(nodes, nodes), 2: random_tree(nodes, nodes + 1)}
    rig.verify(trees, {row: path_to(trees[row], nodes - 1) for row in trees})
    rig.decode([0, 1, 2])


@BOTH
def test_forest_has_the_committed_state_as_parent(rollback) -> None:
    """Every slot with parent -1 follows the committed state."""
    rig = StateRig(SHAPES["delta, head"], rollback)
    rig.start(0)
    rig.extend({0: 4})
    rig.verify({0: [-1, -1, 0, 1, -1, 4]}, {0: []})
    rig.decode([0])


@BOTH
def test_verify_does_not_write_a_slot(rollback) -> None:
    """A verify changes no byte of the pool; a commit changes only the slots of requests with accepted rows."""
    rig = StateRig(SHAPES["delta, head"], rollback)
    rig.start(0, 1, 2)
    rig.extend({0: 4, 1: 2, 2: 3})
    rig.backend, inner = _Watched(rig), rig.backend
    tree = random_tree(6, 1)
    rig.verify(dict.fromkeys((0, 1, 2), tree), {0: path_to(tree, 5), 1: [], 2: [0]})
    assert rig.backend.inner is inner
    assert rig.backend.moved == {rig.slots.slot_of(0), rig.slots.slot_of(2), 0}


class _Watched:
    """Compares the pool's bytes before each call of a verify, and around its commit."""

    def __init__(self, rig: StateRig) -> None:
        self.inner, self.pool, self.before = rig.backend, rig.pool, self._bytes(rig.pool)
        self.moved: set[int] = set()

    def __getattr__(self, name: str):
        def call(*arguments):
            assert all(torch.equal(a, b) for a, b in zip(self.before, self._bytes(self.pool), strict=True))
            getattr(self.inner, name)(*arguments)
            if name == "commit":
                after = self._bytes(self.pool)
                for old, new in zip(self.before, after, strict=True):
                    self.moved |= set((old != new).flatten(2).any(2).any(0).nonzero()[:, 0].tolist())

        return call

    @staticmethod
    def _bytes(pool) -> list[torch.Tensor]:
        return [one.clone().view(torch.int64) for one in (pool.state, pool.conv)]


@BOTH
def test_verify_without_commit_has_no_effect(rollback) -> None:
    """A verify that is not committed, and one with a count of 0, leave the next round as it would have been."""
    rig = StateRig(SHAPES["delta, key"], rollback)
    rig.start(0)
    rig.extend({0: 3})
    tree = random_tree(6, 3)
    commit = rig.backend.commit
    rig.backend.commit = lambda *_: None
    rig.verify({0: tree}, {0: []})
    rig.backend.commit = commit
    rig.verify({0: tree}, {0: []})
    rig.verify({0: tree}, {0: path_to(tree, 4)})
    rig.decode([0])


@EACH
@BOTH
def test_recycled_slot_starts_from_zeros(shape, rollback) -> None:
    """A request with no prefix reads zeros from a slot of another request, in decode, verify and prefill."""
    rig = StateRig(shape, rollback)
    tree = random_tree(6, 9)
    for first in (lambda: rig.decode([0]), lambda: rig.verify({0: tree}, {0: [0]}), lambda: rig.extend({0: 2})):
        rig.start(0)
        first()
        rig.decode([0])
        rig.stop(0)


@EACH
@BOTH
def test_checkpoint_is_the_state_at_a_multiple(shape, rollback) -> None:
    """A commit that crosses a multiple of the interval saves that state, inside the path or at its end."""
    rig = StateRig(shape, rollback, interval=4)
    rig.start(0, 1, 2)
    rig.extend({0: 4, 1: 3})
    chain = list(range(-1, 5))
    for row in (0, 1, 2):
        rig.slots.lend(row)
    before = rig.histories[2]
    rig.verify({0: chain, 1: chain, 2: chain}, {0: [0, 1, 2, 3, 4], 1: [0, 1], 2: [0, 1]}, chain=True)
    saved = {0: rig.slots.keep(0), 1: rig.slots.keep(1)}
    assert before == rig.histories[2] and len(before) == 2
    assert rig.pool.state[:, rig.slots.lent_to(2)].isnan().all()
    assert rig.pool.conv[:, rig.slots.lent_to(2)].isnan().all()
    for row, length in ((0, 8), (1, 4)):
        tokens = rig.histories[row][:length]
        rig.stop(row)
        rig.start(row)
        rig.pool.copy(torch.tensor([saved[row]]), torch.tensor([rig.slots.slot_of(row)]))
        rig.slots.release(saved[row])
        rig.lengths.advance(torch.tensor([row]), torch.tensor([length]))
        rig.lengths.dispatched([row], length)
        rig.lengths.settle([row], [length], length)
        rig.histories[row] = tokens
    rig.verify({0: random_tree(6, 1), 1: random_tree(6, 2)}, {0: [0], 1: [0]})
    rig.decode([0, 1])


@BOTH
def test_prefill_and_decode_save_only_at_their_end(rollback) -> None:
    """EXTEND and DECODE save the state if they end at a multiple, and leave leave the save slot untouched otherwise."""
    rig = StateRig(SHAPES["delta, head"], rollback, interval=4)
    rig.start(0, 1)
    rig.slots.lend(0)
    rig.slots.lend(1)
    rig.extend({0: 7, 1: 3})
    lent = [rig.slots.lent_to(row) for row in (0, 1)]
    assert rig.pool.state[:, lent].isnan().all()
    rig.decode([0, 1])
    for row in (0, 1):
        slot = rig.slots.slot_of(row)
        assert torch.equal(rig.pool.state[:, lent[row]], rig.pool.state[:, slot])
        assert torch.equal(rig.pool.conv[:, lent[row]], rig.pool.conv[:, slot])


def test_replay_equals_decode_bit_by_bit() -> None:
    """The state after an accepted chain has the bits of the state after decoding the same tokens."""
    verified, decoded = (StateRig(SHAPES["delta, head"], nodes=4, layers=1) for _ in range(2))
    tokens = [verified.token() for _ in range(4)]
    verified.start(0)
    verified.token = iter(tokens * 4).__next__  # the three padded requests repeat the tokens
    verified.verify({0: [-1, 0, 1, 2]}, {0: [0, 1, 2, 3]}, chain=True)
    decoded.start(0)
    decoded.weight, decoded.bias = verified.weight, verified.bias
    for one in tokens:
        decoded.token = iter([one] * 4).__next__
        decoded.decode([0])
    assert torch.equal(*(rig.pool.state[0, rig.slots.slot_of(0)] for rig in (verified, decoded)))
