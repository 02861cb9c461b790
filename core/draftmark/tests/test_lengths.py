"""Sequence lengths: one owner, and host views with a type that states their precision."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftmark.batch import ForwardBatch
from draftmark.errors import LengthsError
from draftmark.lengths import Exact, SequenceLengths, Unknown, UpperBound

ROWS, LIMIT = 5, 40


@pytest.fixture
def lengths():
    """Return a `SequenceLengths` with five request rows of up to 40 tokens."""
    return SequenceLengths(ROWS, LIMIT, "cpu")


def commit(lengths, rows, by, at_most):
    """Add `by` to the lengths on the device, and record on the host that up to `at_most` tokens were dispatched."""
    lengths.advance(torch.tensor(rows), torch.tensor(by, dtype=torch.int32))
    lengths.dispatched(rows, at_most)


def test_a_new_owner_is_empty(lengths):
    """A new `SequenceLengths` has length 0 in every row, on device and host, and one null row per request row."""
    assert lengths.first_null_row == ROWS
    assert lengths.device.tolist() == [0] * (2 * ROWS)
    assert lengths.device.dtype == torch.int32
    assert lengths.exact(range(ROWS)) == Exact((0,) * ROWS)


def test_an_advance_in_flight_is_a_bound_until_it_settles(lengths):
    """Between dispatch and settle the host has the bound settled + at_most; after settle it has the length."""
    commit(lengths, [0, 2], [3, 1], at_most=4)
    assert lengths.device.tolist() == [3, 0, 1, 0, 0] + [0] * ROWS
    assert lengths.upper_bound([0, 1, 2]) == UpperBound((4, 0, 4))
    assert lengths.exact([1]) == Exact((0,))
    with pytest.raises(LengthsError, match=r"rows \[0, 2\] have tokens in flight.*settle"):
        lengths.exact([0, 1, 2])
    lengths.settle([0, 2], [3, 1], at_most=4)
    assert lengths.exact([0, 1, 2]) == Exact((3, 0, 1))
    assert lengths.upper_bound([0, 1, 2]) == UpperBound((3, 0, 1))


def test_two_dispatches_settle_one_by_one(lengths):
    """With two dispatches in flight the host's bound includes both, and each settle removes one."""
    commit(lengths, [1], [2], at_most=4)
    commit(lengths, [1], [3], at_most=5)
    assert lengths.upper_bound([1]).lens == (9,)
    lengths.settle([1], [2], at_most=4)
    assert lengths.upper_bound([1]).lens == (7,)
    lengths.settle([1], [3], at_most=5)
    assert lengths.exact([1]).lens == (5,)


def test_an_advance_without_tokens_in_flight_is_exact(lengths):
    """A dispatch of 0 tokens leaves the exact length known."""
    commit(lengths, [1], [0], at_most=0)
    assert lengths.exact([1]).lens == (0,)


def test_the_bound_never_exceeds_the_geometry_limit(lengths):
    """The sum of tokens in flight may exceed the limit; the bound is clamped to it."""
    for _ in range(9):
        commit(lengths, [0], [0], at_most=8)
    assert lengths.upper_bound([0]).lens == (LIMIT,)


def test_unknown_is_the_limit_for_every_row(lengths):
    """Unknown lengths have the geometry's limit as each request's upper bound."""
    assert lengths.unknown([0, 3]) == Unknown(2, LIMIT)
    assert lengths.unknown([0, 3]).upper_bound() == (LIMIT, LIMIT)
    assert Unknown(0, LIMIT).upper_bound() == ()


@pytest.mark.parametrize("kind", [Exact, UpperBound])
def test_every_kind_gives_an_upper_bound(kind):
    """Exact, UpperBound and Unknown all return an upper bound of each request's length."""
    assert kind((3, 0)).upper_bound() == (3, 0)


def test_null_rows_never_move(lengths):
    """Null rows stay 0, also when several padded entries use one null row with any token count."""
    rows = [1, ROWS, ROWS, 2 * ROWS - 1]
    lengths.advance(torch.tensor(rows), torch.tensor([2, 7, 7, 7], dtype=torch.int32))
    assert lengths.device.tolist() == [0, 2, 0, 0, 0] + [0] * ROWS


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_advance_takes_any_integers(lengths, dtype):
    """`by` may be int32 or int64; lengths stay int32."""
    lengths.advance(torch.tensor([0, 4]), torch.tensor([2, 7], dtype=dtype))
    assert lengths.device[:ROWS].tolist() == [2, 0, 0, 0, 7]


@pytest.mark.parametrize("row", [-1, ROWS, 2 * ROWS])
def test_only_request_rows_can_be_reset(lengths, row):
    """reset() of a null row, or of an index out of range, raises an error with the row."""
    with pytest.raises(LengthsError, match=f"row {row} is not a request row"):
        lengths.reset(row)


@pytest.mark.parametrize("row", [-1, ROWS])
def test_the_host_methods_accept_request_rows_only(lengths, row):
    """A null row or a negative row raises an error with the row, although Python would accept a negative index."""
    for call, arguments in {"dispatched": (3,), "settle": ([0], 0), "exact": (), "upper_bound": ()}.items():
        with pytest.raises(LengthsError, match=f"row {row}"):
            getattr(lengths, call)([row], *arguments)


def test_reset_clears_device_and_host(lengths):
    """reset() clears the length and the tokens in flight of a request that ends."""
    commit(lengths, [3], [2], at_most=4)
    lengths.reset(3)
    assert lengths.device[3] == 0
    assert lengths.exact([3]) == Exact((0,))


@pytest.mark.parametrize(
    ("by", "at_most"), [([5], 4), ([-1], 4), ([1], 5), ([0], 5)], ids=["more", "negative", "undispatched", "too wide"]
)
def test_settling_tokens_that_were_not_dispatched_is_refused(lengths, by, at_most):
    """More tokens than at_most, negative tokens, or a larger at_most than in flight raise and change nothing."""
    commit(lengths, [2], [1], at_most=4)
    with pytest.raises(LengthsError, match="row 2 settles"):
        lengths.settle([2], by, at_most)
    assert lengths.upper_bound([2]).lens == (4,)


def test_settling_twice_is_refused(lengths):
    """Each dispatch can be settled once."""
    commit(lengths, [2], [1], at_most=4)
    lengths.settle([2], [1], at_most=4)
    with pytest.raises(LengthsError, match="0 are in flight"):
        lengths.settle([2], [1], at_most=4)


def test_negative_tokens_cannot_be_dispatched(lengths):
    """A negative bound is refused, because it would put the host's view below the device's length."""
    with pytest.raises(LengthsError):
        lengths.dispatched([0], -1)


def test_advance_is_device_only_and_in_place(lengths):
    """The tensor keeps its address, so a captured advance changes the tensor that later readers use."""
    address = lengths.device.data_ptr()
    commit(lengths, [0], [3], at_most=3)
    assert lengths.device.data_ptr() == address


def test_no_object_stores_a_sum_of_lengths(lengths):
    """Neither the owner, nor the batch, nor any host view stores a sum (sglang#26753)."""
    commit(lengths, [0], [3], at_most=3)
    names = {field.name for kind in (ForwardBatch, Exact, UpperBound, Unknown) for field in fields(kind)}
    names |= set(vars(lengths)) | set(dir(SequenceLengths))
    assert not [name for name in names if "sum" in name]


class Rounds(RuleBasedStateMachine):
    """Runs random engine actions: a request advances, the host settles the oldest advance, a request ends.

    The test counts the true lengths in Python. The device must equal them, and every host view must bound them.
    """

    @initialize()
    def begin(self):
        self.lengths = SequenceLengths(ROWS, LIMIT, "cpu")
        self.true = [0] * ROWS
        self.flights: list[tuple[list[int], list[int], int]] = []

    @rule(
        rows=st.lists(st.integers(0, ROWS - 1), unique=True, min_size=1),
        padding=st.integers(0, 2),
        at_most=st.integers(0, 6),
        data=st.data(),
    )
    def dispatch(self, rows, padding, at_most, data):
        by = [data.draw(st.integers(0, min(at_most, LIMIT - self.true[row]))) for row in rows]
        padded = torch.tensor(rows + list(range(ROWS, ROWS + padding)))
        self.lengths.advance(padded, torch.tensor(by + [at_most] * padding, dtype=torch.int32))
        self.lengths.dispatched(rows, at_most)
        self.flights.append((rows, by, at_most))
        for row, count in zip(rows, by, strict=True):
            self.true[row] += count

    @precondition(lambda self: self.flights)
    @rule()
    def settle(self):
        self.lengths.settle(*self.flights.pop(0))

    @rule(row=st.integers(0, ROWS - 1))
    def leave(self, row):
        self.lengths.reset(row)
        self.true[row] = 0
        self.flights = [
            ([r for r in rows if r != row], [n for r, n in zip(rows, by, strict=True) if r != row], at_most)
            for rows, by, at_most in self.flights
        ]

    @invariant()
    def the_device_is_settled_plus_in_flight(self):
        unsettled = [0] * ROWS
        for rows, by, _ in self.flights:
            for row, count in zip(rows, by, strict=True):
                unsettled[row] += count
        settled = [n - late for n, late in zip(self.true, unsettled, strict=True)]
        assert self.lengths.device.tolist() == self.true + [0] * ROWS, self.flights
        pending = {row for rows, _, at_most in self.flights for row in rows if at_most}
        for row in range(ROWS):
            if row in pending:
                with pytest.raises(LengthsError):
                    self.lengths.exact([row])
            else:
                assert self.lengths.exact([row]).lens == (settled[row],), self.flights

    @invariant()
    def every_host_view_bounds_the_device(self):
        rows = range(ROWS)
        for view in (self.lengths.upper_bound(rows), self.lengths.unknown(rows)):
            pairs = zip(self.lengths.device[:ROWS].tolist(), view.upper_bound(), strict=True)
            assert all(n <= bound <= LIMIT for n, bound in pairs), (view, self.true, self.flights)


TestRounds = Rounds.TestCase
TestRounds.settings = settings(max_examples=60, stateful_step_count=25)
