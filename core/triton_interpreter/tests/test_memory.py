"""Tests of masked loads and stores of whole tiles: they equal the interpreter's loop over elements, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from triton.runtime import interpreter

from draftmark_triton_interpreter import memory

LOAD, STORE = interpreter._interpreter.load, interpreter._interpreter.store
ROWS, COLUMNS, PITCH = 24, 48, 64
PLACES = {
    "one pitch": lambda rows, dice: rows * PITCH,
    "adjacent rows": lambda rows, dice: rows * COLUMNS,
    "rows backwards": lambda rows, dice: rows[::-1] * PITCH,
    "one row": lambda rows, dice: rows * 0,
    "rows of pages": lambda rows, dice: dice.permutation(ROWS)[rows] * PITCH,
    "odd bytes": lambda rows, dice: rows * PITCH,
}
"""Element offset of each row in the memory."""
MASKS = {
    "all": lambda dice: np.ones((ROWS, COLUMNS), np.bool_),
    "none": lambda dice: np.zeros((ROWS, COLUMNS), np.bool_),
    "rows": lambda dice: np.broadcast_to((np.arange(ROWS) < 17)[:, None], (ROWS, COLUMNS)),
    "some": lambda dice: dice.random((ROWS, COLUMNS)) < 0.5,
}
CASES = list(itertools.product(PLACES, MASKS, (np.uint8, np.uint16, np.float32, np.float64)))


class FewCalls(Exception):
    """Raised where a tile is read or written by the interpreter's loop."""


def _none(*_: object) -> None:
    raise FewCalls


def _tile(place: str, mask: str, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return memory, addresses, mask and other values. Masked addresses are invalid."""
    dice = np.random.default_rng(len(place) + len(mask))
    held = dice.integers(0, 255, (ROWS * PITCH + 1) * 8, np.uint8)
    rows = PLACES[place](np.arange(ROWS), dice).astype(np.uint64)
    size = np.dtype(dtype).itemsize
    pointers = np.uint64(held.ctypes.data) + size * (rows[:, None] + np.arange(COLUMNS, dtype=np.uint64))
    pointers = pointers + np.uint64(place == "odd bytes") * (np.arange(ROWS, dtype=np.uint64)[:, None] % 2)
    kept = MASKS[mask](dice)
    other = dice.integers(0, 9, (ROWS, COLUMNS)).astype(dtype)
    return held, np.where(kept, pointers, np.uint64(8)), kept, other


@pytest.mark.parametrize(("place", "mask", "dtype"), CASES)
def test_loads_equal_the_loop(place: str, mask: str, dtype: type) -> None:
    """Every layout of rows, mask and size of element gives the bytes of the interpreter's loop."""
    held, pointers, kept, other = _tile(place, mask, dtype)
    expected = LOAD(pointers, np.ascontiguousarray(kept), other, np.dtype(dtype))
    each = LOAD if place == "odd bytes" else _none
    found = memory.load(pointers, kept, other, np.dtype(dtype), each)
    assert found.dtype == expected.dtype and found.tobytes() == expected.tobytes()
    assert not np.shares_memory(found, held) and not np.shares_memory(found, other)


@pytest.mark.parametrize(("place", "mask", "dtype"), CASES)
def test_stores_equal_the_loop(place: str, mask: str, dtype: type) -> None:
    """Every layout leaves the memory that the interpreter's loop leaves, also where rows share addresses."""
    held, pointers, kept, values = _tile(place, mask, dtype)
    before = held.copy()
    STORE(pointers, values, np.ascontiguousarray(kept))
    expected = held.copy()
    held[:] = before
    memory.store(pointers, values, kept, STORE if place == "odd bytes" else _none)
    assert (held == expected).all()


def test_few_and_far_elements_take_the_loop() -> None:
    """A handful of elements, and elements further apart than an index array reaches, are left to the loop."""
    few = np.zeros(memory.FEW, np.uint64)
    with pytest.raises(FewCalls):
        memory.load(few, few == 0, few, np.dtype(np.uint64), _none)
    far = np.arange(1000, dtype=np.uint64) * np.uint64(memory.FAR)
    for call in (
        lambda: memory.load(far, far >= 0, far, far.dtype, _none),
        lambda: memory.store(far, far, far >= 0, _none),
    ):
        with pytest.raises(FewCalls):
            call()
