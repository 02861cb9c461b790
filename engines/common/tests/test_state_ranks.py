"""Rounds of two tensor-parallel ranks over recurrent state: their heads together are the whole, their slots differ."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from draftmark import DraftShape, Gate, Limits, Mode, Recurrence, StateGeometry, StateShape, load
from draftmark.runtime import (
    BatchBuffers,
    ForwardBatch,
    SequenceLengths,
    StatePool,
    VerifyResult,
    commit_round,
    ragged,
    write_tail,
)
from draftmark_engines.ranks import step_digest
from draftmark_speculative.slots import StateSlots
from engines.common.tests.two_ranks import results_of_two_ranks

HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM, KERNEL = 4, 2, 8, 6, 4
PARENTS = ((-1, 0, 0, 2), (-1, 0, 1, 1))
PATHS = ((0, 2, 3), (0, 1))
MODES = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)


@dataclass
class Rank:
    """One rank of a layer with a short convolution, and two requests.

    Attributes:
        order: request rows in the order in which they take slots.
        copied: the layer has one group of queries and keys, which each rank copies (Mamba2). Otherwise it has a delta
            rule, and ranks divide all heads.
    """

    rank: int
    ranks: int
    order: tuple[int, ...]
    copied: bool = False

    def __post_init__(self) -> None:
        whole = 1 if self.copied else KEY_HEADS
        heads, keys = HEADS // self.ranks, whole // (1 if self.copied else self.ranks)
        # Channels of q, k and v in the convolution, of the whole layer and of this rank.
        self.parts = whole * KEY_DIM, whole * KEY_DIM, HEADS * VALUE_DIM
        self.own = keys * KEY_DIM, keys * KEY_DIM, heads * VALUE_DIM
        recurrence = Recurrence.DECAY if self.copied else Recurrence.DELTA
        shape = StateShape(
            recurrence, Gate.HEAD, heads, keys, KEY_DIM, VALUE_DIM, sum(self.own), KERNEL, "float64", "float64",
            "float64",
        )  # fmt: skip
        limits = Limits(max_num_reqs=2, max_context_len=64, max_extend_tokens=16, state_interval=8)
        self.geometry = StateGeometry.create(shape, limits, DraftShape(2, 1, 4), modes=MODES)
        self.backend = load("reference").open_state(self.geometry, "cpu", guard=True)
        self.pool = StatePool(self.geometry, 6, 1, "cpu")
        self.slots = StateSlots(2, [self.pool])
        self.lengths = SequenceLengths(2, self.geometry.max_prefix_len, "cpu")
        self.buffers = BatchBuffers(self.geometry, "cpu")
        for row in self.order:
            self.slots.take(row)
            self.slots.lend(row)
        self.random = torch.Generator().manual_seed(0)
        self.weight = self.of_parts(self.draw(sum(self.parts), KERNEL).t()).t().contiguous()
        self.outs: list[torch.Tensor] = []
        self.digests: list[torch.Tensor] = []

    def draw(self, *shape: int) -> torch.Tensor:
        """Draw random numbers that are equal on each rank."""
        return torch.randn(*shape, dtype=torch.float64, generator=self.random)

    def of_heads(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's heads of a tensor ``[rows, heads, …]``."""
        return whole.chunk(self.ranks, 1)[self.rank].contiguous()

    def of_parts(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's channels of a tensor ``[rows, channels]``."""
        ranks = [part // own for part, own in zip(self.parts, self.own, strict=True)]  # 1 for a part that is copied
        parts = zip(whole.split(self.parts, 1), ranks, strict=True)
        return torch.cat([part.chunk(count, 1)[self.rank % count] for part, count in parts], 1).contiguous()

    def batch(self, mode: Mode, q_lens: tuple[int, ...] = ()) -> ForwardBatch:
        """Return a filled batch of both requests."""
        rows = torch.tensor([0, 1])
        prefix, host = self.lengths.device[rows], self.lengths.exact([0, 1])
        if mode is Mode.EXTEND:
            table = torch.zeros(2, 0, dtype=torch.int32)
            return ragged(self.geometry, prefix, table, q_lens, host, state_slots=self.slots.device[rows])
        batch = self.buffers.uniform(mode, 0, 2, 2, host, tree=mode is Mode.VERIFY)
        batch.prefix_lens.copy_(prefix)
        batch.state_slots.copy_(self.slots.device[rows])
        write_tail(batch, self.geometry, torch.tensor(PARENTS) if mode is Mode.VERIFY else None)
        return batch

    def step(self, mode: Mode, q_lens: tuple[int, ...] = (), accepted: VerifyResult | None = None) -> torch.Tensor:
        """Run one forward of the layer and end the round; return the lengths of the checkpoints."""
        batch, cache, most = self.batch(mode, q_lens), self.pool.layers[0], max(q_lens, default=4)
        self.backend.plan(batch)
        self.backend.write_metadata(batch)
        rows = batch.num_rows
        x, decay, beta = self.draw(rows, sum(self.parts)), self.draw(rows, HEADS), self.draw(rows, HEADS)
        x, mixed = self.of_parts(x), torch.empty(rows, sum(self.own), dtype=torch.float64)
        self.backend.convolve(x, self.weight, None, cache, batch, mixed)
        q, k, v = mixed.split(self.own, 1)
        q, k = (torch.nn.functional.normalize(one.reshape(rows, -1, KEY_DIM), dim=-1) for one in (q, k))
        v = v.reshape(rows, -1, VALUE_DIM).contiguous()
        out = torch.empty_like(v)
        decay, beta = self.of_heads(-decay.abs() / 4), self.of_heads(beta.sigmoid())
        self.backend.recur(q, k, v, decay, None if self.copied else beta, cache, batch, out)
        self.outs.append(out)
        self.digests.append(step_digest(batch, 1))
        self.lengths.dispatched([0, 1], most)
        save, both = self.slots.save[:2], torch.tensor([0, 1])
        saved = commit_round(batch, accepted, self.lengths, both, (), ((self.backend, self.pool),), save)
        counts = batch.q_indptr.diff() if accepted is None else accepted.accept_lens
        self.lengths.settle([0, 1], counts.tolist(), most)
        assert saved is not None
        return saved

    def run(self) -> Rank:
        """Run a prefill, two rounds of trees and a plain decode between them."""
        index = torch.tensor([[*path, *range(len(path), 4)] for path in PATHS])
        accepted = VerifyResult(torch.full_like(index, -1), torch.tensor([len(path) for path in PATHS]), index)
        rounds = ((Mode.EXTEND, (6, 3), None), (Mode.VERIFY, (), accepted), (Mode.DECODE, (), None))
        for mode, q_lens, path in (*rounds, rounds[1]):
            saved = self.step(mode, q_lens, path)
            self.outs.append(saved.double().view(-1, 1, 1).expand(-1, HEADS // self.ranks, 1))
        return self

    def states(self) -> torch.Tensor:
        """Return the state of each request and of each checkpoint, ``[4, heads, value_dim, key_dim]``."""
        slots = [self.slots.slot_of(row) for row in (0, 1)] + [self.slots.lent_to(row) for row in (0, 1)]
        return self.pool.state[0, slots]


def _serve(rank: int, results) -> None:
    import torch.distributed as dist

    for copied in (False, True):
        mine = Rank(rank, 2, (0, 1) if rank == 0 else (1, 0), copied).run()
        given = [*mine.outs, mine.states(), torch.stack(mine.digests)]
        every = []
        for tensor in given:
            parts = [torch.empty_like(tensor.contiguous()) for _ in range(2)]
            dist.all_gather(parts, tensor.contiguous())
            every.append([part.tolist() for part in parts])
        results.put((copied, rank, every, mine.slots.device.tolist()))


@pytest.mark.long
def test_two_ranks_commit_as_one():
    """With slots of their own, two ranks give the outputs, states and checkpoints of one, and agree on each step.

    The ranks divide the heads, or copy a group of keys that they cannot divide.
    """
    found = {(copied, rank): rest for copied, rank, *rest in results_of_two_ranks(_serve, each=2)}
    for copied in (False, True):
        (every, slots), (_, others) = (found[copied, rank] for rank in (0, 1))
        assert slots != others, "the test needs ranks with different slots"
        whole = Rank(0, 1, (0, 1), copied).run()
        *outs, states, digests = every
        for parts, wanted in zip([*outs, states], [*whole.outs, whole.states()], strict=True):
            torch.testing.assert_close(torch.cat([torch.tensor(one).double() for one in parts], 1), wanted)
        assert digests[0] == digests[1], "slots are no part of a step's digest"
        assert whole.lengths.device.tolist()[:2] == [13, 8]


@pytest.mark.parametrize("node", [1, 3])
def test_parents_are_part_of_the_digest(node):
    """Ranks that hold different parents have different digests, although mask and depth are equal."""
    one = Rank(0, 1, (0, 1))
    one.step(Mode.EXTEND, (6, 3))
    batch = one.batch(Mode.VERIFY)
    before = step_digest(batch, 1).clone()
    batch.tail.parents[1, node] += 1
    assert not torch.equal(before, step_digest(batch, 1))
