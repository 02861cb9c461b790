"""Loads of tensor descriptors by one copy. Triton's interpreter loads a box through one pointer per element."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton.language import core

from .recipe import set_signature
from .shortcuts import bitwise_equal, unchecked_handle

ALIGNMENT = 16
"""Bytes to which TMA aligns the start of a box. The interpreter raises an error for another start."""


def copied_boxes(load: Callable[..., Any]) -> Callable[..., Any]:
    """Return `load` of a tensor descriptor with a fast path: a copy, if the first copy equals the interpreter's load.

    A box with cells outside the tensor, and a descriptor that rounds or does not pad with zeros, use `load`.
    """
    known: dict[tuple[Any, ...], dict[str, Any] | None] = {}
    new, tensor = object.__new__, core.tensor

    def loaded(descriptor: Any, offsets: Any, *more: Any, **options: Any) -> Any:
        handle = descriptor.handle
        key = handle.base.dtype.name, *handle.block_shape
        if key in known and known[key] is None:
            return load(descriptor, offsets, *more, **options)
        box = _box(handle, [_integer(one) for one in offsets])
        if box is None:
            return load(descriptor, offsets, *more, **options)
        if key not in known:
            made = load(descriptor, offsets, *more, **options)
            set_signature(made)
            like = made.handle.data
            equal = like.shape == box.shape and bitwise_equal(box.view(like.dtype), like)
            known[key] = dict(vars(made)) if equal else None
            return made
        found: Any = known[key]
        like = found["handle"]
        result = new(tensor)
        result.__dict__ = {**found, "handle": unchecked_handle(box.view(like.data.dtype), like.dtype)}
        return result

    return loaded


def _box(handle: Any, begin: Sequence[int]) -> Any:
    """Return a copy of a box as unsigned integers, or None if it is not wholly inside the tensor."""
    size = handle.base.dtype.element_ty.primitive_bitwidth // 8
    if getattr(handle, "round_f32_to_tf32", False) or size not in (1, 2, 4, 8) or begin[-1] * size % ALIGNMENT:
        return None
    address, strides, span = int(handle.base.data[0]), [], size
    for first, extent, whole, stride in zip(begin, handle.block_shape, handle.shape, handle.strides, strict=True):
        if first < 0 or first + extent > int(whole.data[0]):
            return None
        step = int(stride.data[0]) * size
        strides.append(step)
        address += first * step
        span += (extent - 1) * step
    memory = (ctypes.c_ubyte * span).from_address(address)
    return np.ndarray(tuple(handle.block_shape), f"u{size}", memory, strides=tuple(strides)).copy()


def _integer(offset: Any) -> int:
    """Return an offset of a box, a scalar tensor or a constant, as an integer."""
    if type(offset) is core.tensor:
        return int(offset.handle.data.item())
    return int(offset.value if type(offset) is core.constexpr else offset)
