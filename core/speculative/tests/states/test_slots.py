"""Tests of the assignment of state slots to request rows."""

from __future__ import annotations

import pytest

from draftmark import BufferError, Gate, Limits, Recurrence, StateGeometry, StateShape
from draftmark.runtime import StatePool
from draftmark_speculative.allocator import CacheExhausted
from draftmark_speculative.slots import StateSlots

SHAPE = StateShape(Recurrence.DELTA, Gate.HEAD, 2, 1, 4, 3, 8, 4, "float32")
GEOMETRY = StateGeometry.create(SHAPE, Limits(3, 64), num_layers=2)


@pytest.fixture
def pool() -> StatePool:
    """Return a pool of seven slots; two are null slots."""
    return StatePool(GEOMETRY, 7, 2, "cpu")


@pytest.fixture
def slots(pool) -> StateSlots:
    """Return the slots of three request rows."""
    return StateSlots(3, [pool])


def test_rows_get_slots_and_give_them_back(slots) -> None:
    """A row's slot is distinct and on the device; rows without one, and null rows, have null slots."""
    assert slots.device.tolist() == [0, 1, 0] * 2 and slots.free == 5
    taken = [slots.take(row) for row in range(3)]
    assert sorted(taken) == [2, 3, 4] and slots.device.tolist() == [*taken, 0, 1, 0]
    assert slots.slot_of(1) == taken[1] and slots.free == 2
    slots.give_back(1)
    assert slots.slot_of(1) is None and slots.device.tolist() == [taken[0], 1, taken[2], 0, 1, 0]
    slots.give_back(1)
    assert slots.free == 3


def test_spare_slots_become_checkpoints(slots) -> None:
    """A lent slot is in `save` until it is kept; a kept one is free again only after its release."""
    slots.take(0)
    lent = slots.lend(0)
    assert slots.save.tolist() == [lent, 1, 0, 0, 1, 0] and slots.lent_to(0) == lent
    assert slots.keep(0) == lent
    assert slots.save.tolist() == [0, 1, 0, 0, 1, 0] and slots.lent_to(0) is None
    slots.lend(0)
    slots.give_back(0)
    assert slots.free == 4
    slots.release(lent)
    assert slots.free == 5
    with pytest.raises(BufferError, match="release each slot"):
        slots.release(lent)


def test_wrong_calls_are_refused(slots) -> None:
    """A second slot for a row, rows that do not exist, and keeping nothing raise errors; nothing changes."""
    slots.take(0)
    with pytest.raises(BufferError, match="already"):
        slots.take(0)
    with pytest.raises(BufferError, match="no spare slot"):
        slots.keep(0)
    for call in (slots.take, slots.lend, slots.give_back, slots.keep, slots.slot_of, slots.lent_to):
        for row in (3, -1, True, 0.0):
            with pytest.raises(BufferError, match="not a request row"):
                call(row)
    assert slots.free == 4


def test_no_free_slot_is_named() -> None:
    """A pool without a free slot raises `CacheExhausted`, which takes nothing."""
    slots = StateSlots(3, [StatePool(GEOMETRY, 3, 1, "cpu")])
    slots.take(0)
    slots.take(1)
    with pytest.raises(CacheExhausted, match="1 state slots are needed, but 0 of 2 are free"):
        slots.take(2)
    slots.give_back(0)
    assert slots.take(2) == 1


def test_pools_of_other_sizes_are_refused(pool) -> None:
    """All pools of a model have the same slots."""
    with pytest.raises(BufferError, match="7 slots"):
        StateSlots(3, [StatePool(GEOMETRY, 8, 2, "cpu"), pool])


def test_guard_mode_poisons_a_slot_that_is_given_out(monkeypatch) -> None:
    """A new pool is NaN, and a slot is NaN in every layer when a row gets it."""
    monkeypatch.setenv("DRAFTMARK_GUARD", "1")
    pool = StatePool(GEOMETRY, 7, 2, "cpu")
    assert pool.state.isnan().all() and pool.conv.isnan().all()
    pool.state.zero_()
    pool.conv.zero_()
    slots = StateSlots(3, [pool], poison=True)
    given = [slots.take(1), slots.lend(1)]
    for tensor in (pool.state, pool.conv):
        poisoned = tensor.isnan().flatten(2).all(2).all(0)
        assert poisoned.nonzero()[:, 0].tolist() == sorted(given)
        assert not tensor.isnan().flatten(2).any(2).any(0)[~poisoned].any()
