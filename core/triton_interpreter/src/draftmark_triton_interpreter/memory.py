"""Masked loads and stores of interpreted kernels by a few NumPy calls, in place of a loop over single elements.

The interpreter's own loop takes tens of nanoseconds per element. Tiles of many elements are read and written here as
a strided view of the memory, or through one index array.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

FEW = 128
"""Largest number of elements for which the interpreter's loop is as fast."""
FAR = 2**40
"""Largest distance in bytes between two elements that one index array covers."""


def load(pointers: Any, mask: Any, other: Any, dtype: Any, each: Any) -> Any:
    """Return the elements at `pointers` where `mask` is True, and those of `other` elsewhere.

    Args:
        pointers: uint64 addresses; those of masked elements may be invalid.
        mask: bool, like pointers.
        other: array of `dtype`, like pointers.
        dtype: dtype of the elements.
        each: the interpreter's function with the first four arguments, for cases that have no faster way.
    """
    if pointers.size <= FEW:
        return each(pointers, mask, other, dtype)
    if mask.all():
        found = _view(pointers, dtype)
        if found is not None:
            return found.copy()
        found = _elements(pointers, dtype)
        return each(pointers, mask, other, dtype) if found is None else found[0][found[1]]
    if not mask.any():
        return other.copy()
    found = _elements(pointers[mask], dtype)
    if found is None:
        return each(pointers, mask, other, dtype)
    result = other.copy()
    result[mask] = found[0][found[1]]
    return result


def store(pointers: Any, values: Any, mask: Any, each: Any) -> None:
    """Write `values` to `pointers` where `mask` is True; of equal addresses the last one keeps its value.

    Args:
        each: the interpreter's function with the first three arguments, for cases that have no faster way.
    """
    if pointers.size > FEW:
        if not mask.any():
            return
        if mask.all():
            place = _view(pointers, values.dtype)
            if place is not None:
                place[...] = values
                return
        found = _elements(pointers[mask], values.dtype)
        if found is not None:
            found[0][found[1]] = values[mask]
            return
    each(pointers, values, mask)


def _view(pointers: Any, dtype: Any) -> Any:
    """Return a view of the memory at two-dimensional addresses if rows and columns have one pitch each, else None."""
    if pointers.ndim != 2:
        return None
    first, (rows, columns), width = pointers[0, 0], pointers.shape, dtype.itemsize
    pitch = int(pointers[1, 0] - first) if rows > 1 else width * columns
    if not width * columns <= pitch < FAR:
        return None
    if not np.array_equal(pointers - first, _offsets(rows, columns, pitch, width)):
        return None
    memory = (ctypes.c_char * (pitch * (rows - 1) + width * columns)).from_address(int(first))
    return as_strided(np.frombuffer(memory, dtype), pointers.shape, (pitch, width))


@lru_cache(64)
def _offsets(rows: int, columns: int, pitch: int, width: int) -> Any:
    """Return the byte offsets ``[rows, columns]`` of elements in rows of one pitch, uint64."""
    row, column = np.arange(rows, dtype=np.uint64)[:, None], np.arange(columns, dtype=np.uint64)
    return row * np.uint64(pitch) + column * np.uint64(width)


def _elements(pointers: Any, dtype: Any) -> tuple[Any, Any] | None:
    """Return the memory from the lowest address on as an array, and the index of each address; None if unaligned."""
    first, last = int(pointers.min()), int(pointers.max())
    width = dtype.itemsize
    offsets = pointers - np.uint64(first)
    if last - first > FAR or (width > 1 and int(np.bitwise_or.reduce(offsets, None)) % width):
        return None
    memory = (ctypes.c_char * (last - first + width)).from_address(first)
    return np.frombuffer(memory, dtype), (offsets // np.uint64(width)).view(np.int64)
