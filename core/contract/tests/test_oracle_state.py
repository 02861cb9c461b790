"""Tests of the sequential oracle of recurrent state: against closed forms, by hand, and bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftmark_contract.oracle.history import NO_PARENT, chain
from draftmark_contract.oracle.state import SequentialState

HEADS, VALUE, KEY, ROWS = 2, 3, 4, 6


def _rows(gate_by_key: bool, delta: bool) -> Any:
    torch.manual_seed(3)
    q, k = (torch.nn.functional.normalize(torch.randn(ROWS, 1, KEY), dim=-1).double() for _ in range(2))
    shape = (ROWS, HEADS, KEY) if gate_by_key else (ROWS, HEADS)
    beta = torch.rand(ROWS, HEADS).double() if delta else None
    return q, k, torch.randn(ROWS, HEADS, VALUE).double(), -torch.rand(shape).double(), beta


def _recur(run: SequentialState, rows: Any, parents: tuple[int, ...]) -> torch.Tensor:
    q, k, v, decay, beta = rows
    return run.recur(q, k, v, decay, beta, parents)


def test_one_row_by_hand() -> None:
    """One row of one head: the old state fades, its answer is corrected, and the output reads the new state."""
    run = SequentialState(torch.tensor([[[2.0, 0.0]]]), None, delta=True)
    row = (torch.tensor([[[1.0, 1.0]]]), torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[5.0]]]))
    out = run.recur(*row, torch.tensor([[0.5]]).double().log(), torch.tensor([[0.25]]), chain(1))
    # The state fades to 1, u = 0.25 (5 - 1) = 1, and the new state is [2, 0].
    assert out.tolist() == [[[2.0]]]
    run.keep(0)
    assert run.state is not None and torch.allclose(run.state, torch.tensor([[[2.0, 0.0]]]).double())


@pytest.mark.parametrize("gate_by_key", [False, True])
def test_decay_equals_its_closed_form(gate_by_key: bool) -> None:
    """Without a delta rule a state is the sum of all updates, each faded by the later decays."""
    q, k, v, decay, _ = _rows(gate_by_key, delta=False)
    state = torch.randn(HEADS, VALUE, KEY).double()
    run = SequentialState(state, None, delta=False)
    out = run.recur(q, k, v, decay, None, chain(ROWS))
    total = decay.view(ROWS, HEADS, -1).cumsum(0)
    closed = state * total[-1].exp()[:, None]
    for row in range(ROWS):
        faded = (total[-1] - total[row]).exp()[:, None]
        closed = closed + faded * v[row][..., None] * k[row][:, None]
    assert torch.allclose(run.states[-1], closed, atol=1e-14)
    assert torch.allclose(out[-1], (closed * q[-1][:, None]).sum(-1), atol=1e-14)


@pytest.mark.parametrize("delta", [False, True])
def test_a_path_of_a_tree_equals_its_chain(delta: bool) -> None:
    """Rows of a tree have the bits of their path run as a chain: rows of other branches have no influence."""
    rows = _rows(True, delta)
    parents, path = (NO_PARENT, 0, 0, 1, 2, 3), [0, 1, 3, 5]
    state = torch.randn(HEADS, VALUE, KEY).double()
    tree, line = (SequentialState(state, None, delta=delta) for _ in range(2))
    out = _recur(tree, rows, parents)
    some: Any = [None if one is None else one[path] for one in rows]
    alone = _recur(line, some, chain(len(path)))
    assert torch.equal(out[path], alone) and torch.equal(tree.states[5], line.states[3])


def test_pieces_equal_the_whole() -> None:
    """A prompt in pieces leaves the bits of one prompt: recurrence, window and outputs."""
    rows, x = _rows(False, delta=True), torch.randn(ROWS, 5).double()
    weight, bias = torch.randn(5, 4).double(), torch.randn(5).double()

    def run(pieces: list[int]) -> tuple[torch.Tensor, ...]:
        one = SequentialState(torch.zeros(HEADS, VALUE, KEY), torch.zeros(5, 3), delta=True)
        found, first = [], 0
        for size in pieces:
            here = slice(first, first + size)
            some: Any = [None if part is None else part[here] for part in rows]
            out = _recur(one, some, chain(size))
            found.append(torch.cat((one.convolve(x[here], chain(size), weight, bias), out.flatten(1)), 1))
            one.keep(size - 1)
            first += size
        assert one.state is not None and one.window is not None
        return torch.cat(found), one.state, one.window

    assert all(map(torch.equal, run([ROWS]), run([1, 3, 2])))


def test_convolution_reads_ancestors_and_then_the_window() -> None:
    """The last tap is the row's own; earlier taps read ancestors in the tail, then the window from its end."""
    run = SequentialState(None, torch.tensor([[10.0, 20.0, 30.0]]), delta=False)
    x, weight = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[1000.0, 100.0, 10.0, 1.0]])
    out = run.convolve(x, (NO_PARENT, 0, 0), weight, None, silu=False)
    assert out[:, 0].tolist() == [1 + 300 + 2000 + 10000, 2 + 10 + 3000 + 20000, 3 + 10 + 3000 + 20000]
    run.keep(2)
    assert run.window is not None and run.window.tolist() == [[30.0, 1.0, 3.0]]


def test_keeping_no_row_changes_nothing() -> None:
    """A round without an accepted row leaves state and window."""
    state, window = torch.randn(HEADS, VALUE, KEY).double(), torch.randn(5, 3).double()
    run = SequentialState(state, window, delta=True)
    _recur(run, _rows(False, delta=True), chain(ROWS))
    run.convolve(torch.randn(ROWS, 5), chain(ROWS), torch.randn(5, 4), None)
    run.keep(NO_PARENT)
    assert run.state is not None and run.window is not None
    assert torch.equal(run.state, state) and torch.equal(run.window, window)
