"""`commit_round` ends a round: accepted KV becomes contiguous, then the lengths grow, eagerly and in a graph."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from core.draftmark.tests.bad_calls import Rig
from draftmark import DraftmarkError, Mode
from draftmark.runtime import Exact, GraphKey, Program, VerifyResult, commit_round, slots_of
from draftmark_reference.graphs import RecordedGraphState


def result(paths: list[list[int]]) -> VerifyResult:
    """Return the verification that accepts these nodes of trees with four nodes."""
    index = torch.tensor([[*path, *range(len(path), 4)] for path in paths])
    return VerifyResult(torch.full_like(index, -1), torch.tensor([len(path) for path in paths]), index)


class Log:
    """Tree operations and lengths that record the order of the calls."""

    def __init__(self, rig: Rig) -> None:
        self.calls: list[str] = []
        self.operations, self.advance = rig.tree_ops, rig.lengths.advance
        rig.lengths.advance = self.advanced  # type: ignore[method-assign]

    def compact(self, pool, batch, accepted) -> None:
        """Record the call, then compact."""
        self.calls.append("compact")
        self.operations.compact(pool, batch, accepted)

    def advanced(self, rows, by) -> None:
        """Record the call, then advance."""
        self.calls.append("advance")
        self.advance(rows, by)


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "recorded"])
def test_round_moves_kv_then_advances(graph):
    """KV of the accepted path lies at [L, L + count) in every layer, null rows stay 0, and replays read new inputs."""
    rig = Rig()
    rows, accepted = torch.tensor([2, 4]), result([[0, 1], [0]])

    def step() -> None:
        commit_round(rig.batch, accepted, rig.lengths, rows, kv=((rig.tree_ops, rig.pool),))

    if graph:
        state = RecordedGraphState()
        state.capture(GraphKey(Program.VERIFY, 2), step)
    for path, other in (([0, 1, 2], [0, 3]), ([0, 3], [0])):
        rig.lengths.device.zero_()
        rig.pool.k.normal_(), rig.pool.v.normal_()
        for tensor, new in zip(accepted, result([path, other]), strict=True):
            tensor.copy_(new)
        slots = slots_of(rig.batch.page_table, rig.batch.prefix_lens[:, None].long() + torch.arange(4), 4)
        wanted = [pool.flatten(1, 2).clone() for pool in rig.pool.tensors]
        for pool in wanted:
            for request, nodes in enumerate((path, other)):
                pool[:, slots[request, : len(nodes)]] = pool[:, slots[request, nodes]].clone()
        state.replay(GraphKey(Program.VERIFY, 2)) if graph else step()
        for pool, want in zip(rig.pool.tensors, wanted, strict=True):
            assert torch.equal(pool.flatten(1, 2), want)
        assert rig.lengths.device.tolist() == [0, 0, len(path), 0, 0, 0]


def test_kv_moves_before_the_lengths_advance():
    """KV moves once per group of layers, and the lengths advance last."""
    rig = Rig()
    log = Log(rig)
    commit_round(rig.batch, result([[0, 3], [0]]), rig.lengths, torch.tensor([0, 1]), kv=((log, rig.pool),) * 2)
    assert log.calls == ["compact", "compact", "advance"]


def test_chains_move_no_kv():
    """A batch with a causal tail moves no KV: its accepted rows are contiguous already."""
    rig = Rig()
    log, batch = Log(rig), rig.uniform(Mode.VERIFY, 0, 2, 2, Exact((5, 2)), tree=False)
    commit_round(batch, result([[0, 1, 2], [0]]), rig.lengths, torch.tensor([0, 1]), kv=((log, rig.pool),))
    assert log.calls == ["advance"] and rig.lengths.device.tolist()[:2] == [3, 1]


def test_prefill_and_decode_commit_every_row():
    """Without a verification, every row of an EXTEND or DECODE batch is committed."""
    rig = Rig()
    commit_round(rig.extend(), None, rig.lengths, torch.tensor([1, 0]))
    assert rig.lengths.device.tolist()[:3] == [2, 3, 0]
    batch = rig.uniform(Mode.DECODE, 0, 3, 2, Exact((5, 2)), tree=False)
    commit_round(batch, None, rig.lengths, torch.tensor([1, 0, 5]))
    assert rig.lengths.device.tolist() == [3, 4, 0, 0, 0, 0]


def test_engine_that_owns_lengths_moves_only_kv():
    """Without lengths, as in an engine that counts tokens itself, only KV moves."""
    rig = Rig()
    log = Log(rig)
    commit_round(None, result([[0, 3], [0]]), None, None, kv=((SingleCall(log), "pages"),))
    assert log.calls == ["pages"] and not rig.lengths.device.any()


class SingleCall:
    """KV operations of an engine with its own layout: they get the pool that the pair names, and no batch."""

    def __init__(self, log: Log) -> None:
        self._log = log

    def compact(self, pool, batch, accepted) -> None:
        """Record the pool."""
        assert batch is None and accepted.accept_lens.tolist() == [2, 1]
        self._log.calls.append(pool)


class States:
    """State backend and pool that record a commit's arguments."""

    def __init__(self, log: Log, interval: int) -> None:
        self.geometry = SimpleNamespace(limits=SimpleNamespace(state_interval=interval))
        self._log, self.given = log, []

    def commit(self, pool, batch, accepted, save_slots) -> None:
        """Record the call."""
        assert pool is self
        self._log.calls.append("state")
        self.given.append((batch, accepted, save_slots))


def test_states_move_between_kv_and_lengths():
    """Every group of state layers commits once, after the KV and before the lengths, which it reads."""
    rig = Rig()
    log, accepted = Log(rig), result([[0, 3], [0]])
    states = [States(log, 0), States(log, 0)]
    pairs = [(one, one) for one in states]
    found = commit_round(rig.batch, accepted, rig.lengths, torch.tensor([0, 1]), ((log, rig.pool),), pairs)
    assert found is None and log.calls == ["compact", "state", "state", "advance"]
    assert all(one.given == [(rig.batch, accepted, None)] for one in states)


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE, Mode.VERIFY])
def test_commit_reports_the_checkpoints(mode):
    """The result is the largest multiple of the interval that each request crosses, or 0, from before the round.

    EXTEND and DECODE save a multiple only where their last row ends, so one that they cross is 0.
    """
    rig = Rig()
    states, save = States(Log(rig), 4), torch.zeros(2, dtype=torch.int32)
    if mode is Mode.EXTEND:
        batch, accepted, wanted = rig.extend(prefix_lens=torch.tensor([5, 3], dtype=torch.int32)), None, [8, 0]
    else:
        batch = rig.uniform(mode, 0, 2, 2, Exact((3, 3)), tree=False)
        batch.prefix_lens.copy_(torch.tensor([3, 4] if mode is Mode.DECODE else [3, 5]))
        accepted = result([[0], [0]] if mode is Mode.DECODE else [[0, 1, 2], [0, 1]])
        wanted = [4, 0]
    rows = torch.tensor([0, 1])
    saved = commit_round(batch, accepted, rig.lengths, rows, states=((states, states),), save_slots=save)
    assert saved is not None and saved.dtype is torch.int32 and saved.tolist() == wanted
    (_, path, slots), whole = states.given[0], mode is not Mode.VERIFY
    assert slots is save and (path is None) == whole, "a backend gets a path after a verification only"


def test_refused_commit_changes_nothing():
    """A commit that is refused moves no KV and advances nothing."""
    rig = Rig()
    log, before = Log(rig), rig.pool.k.clone()
    with pytest.raises(DraftmarkError):
        commit_round(rig.batch, None, rig.lengths, torch.tensor([0, 1]), kv=((log, rig.pool),))
    assert not log.calls and torch.equal(before, rig.pool.k)
