"""Shortcuts of builder calls: the NumPy function itself, without the interpreter's checks.

Each shortcut is tried on the recorded operands, and used only if its result is bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

from . import memory
from .recorder import BuilderCall

Shortcut = Callable[..., Any]
BITWISE = (np.bitwise_and, np.bitwise_or, np.bitwise_xor)
"""Functions with the same results on bools as on integers of one bit."""
_new = object.__new__


def shortcut(step: BuilderCall) -> Shortcut | None:
    """Return a faster function that computes this builder call's result from its handles, or None if there is none."""
    write = _SHORTCUTS.get(step.name)
    found = write(step) if write else None
    if found is None or step.made is None:
        return found
    operands = [one for one in step.args if isinstance(one, TensorHandle)]
    return found if bitwise_equal(found(*operands).data, step.made.data) else None


class _Handle(TensorHandle):  # type: ignore[misc]
    """Tensor handle that makes its dictionary of hints at the first use; few handles have hints."""

    def __getattr__(self, name: str) -> Any:
        if name != "attr":
            raise AttributeError(name)
        self.attr: dict[str, Any] = {}
        return self.attr


def unchecked_handle(data: Any, dtype: Any) -> Any:
    """Return a tensor handle built without the constructor's checks."""
    made = _new(_Handle)
    made.data = data
    made.dtype = dtype
    return made


def bitwise_equal(one: Any, other: Any) -> bool:
    """Check whether two arrays are bitwise equal."""
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())


def _binary(step: BuilderCall) -> Shortcut | None:
    left, right, function = step.args
    dtype, wanted = step.made.dtype, step.made.data.dtype
    if left.data.dtype == right.data.dtype == np.bool_ and function not in BITWISE:
        return None  # only the builder handles bool's wrap-around in one bit

    def run(left: Any, right: Any) -> Any:
        data = function(left.data, right.data)
        return unchecked_handle(data if data.dtype is wanted else data.astype(wanted), dtype)

    return run


def _shift_right(step: BuilderCall) -> Shortcut | None:
    if any(one.data.dtype.kind != "i" for one in step.args):
        return None  # the builder changes the type of such numbers
    return _binary(step._replace(args=(*step.args, np.right_shift)))


def _unary(step: BuilderCall) -> Shortcut:
    function, dtype = step.args[1], step.made.dtype
    return lambda operand: unchecked_handle(function(operand.data), dtype)


def _ternary(step: BuilderCall) -> Shortcut:
    function, dtype, wanted = step.args[3], step.made.dtype, step.made.data.dtype

    def run(first: Any, second: Any, third: Any) -> Any:
        data = function(first.data, second.data, third.data)
        return unchecked_handle(data if data.dtype is wanted else data.astype(wanted), dtype)

    return run


def _cast(step: BuilderCall) -> Shortcut:
    source, dtype, wanted = step.args[0].dtype.scalar, step.made.dtype, step.made.data.dtype
    if {source.name, dtype.name} == {"bf16", "fp32"}:
        return lambda operand: unchecked_handle(
            interpreter._convert_float(operand.data, source, dtype, None).view(wanted), dtype
        )
    return lambda operand: unchecked_handle(operand.data.astype(wanted), dtype)


def _bitcast(step: BuilderCall) -> Shortcut:
    dtype, wanted = step.made.dtype, step.made.data.dtype
    return lambda operand: unchecked_handle(operand.data.view(wanted), dtype)


def _expand_dims(step: BuilderCall) -> Shortcut | None:
    axis, dtype = step.args[1], step.made.dtype
    if axis < 0:
        return None
    index = (*[slice(None)] * axis, None)
    return lambda operand: unchecked_handle(operand.data[index], dtype)


def _divide_integers(step: BuilderCall) -> Shortcut:
    dtype, fmod = step.made.dtype, np.fmod
    return lambda left, right: unchecked_handle((left.data - fmod(left.data, right.data)) // right.data, dtype)


def _advance(step: BuilderCall) -> Shortcut:
    dtype, uint64 = step.made.dtype, np.uint64
    width = max(1, step.args[0].get_element_ty().primitive_bitwidth // 8)
    return lambda pointer, offset: unchecked_handle(pointer.data + width * offset.data.astype(uint64), dtype)


def _broadcast(step: BuilderCall) -> Shortcut:
    shape, dtype = step.args[1], step.made.dtype
    return lambda operand: unchecked_handle(np.broadcast_to(operand.data, shape), dtype)


def _load(step: BuilderCall) -> Shortcut:
    dtype, wanted, load = step.made.dtype, step.made.data.dtype, interpreter._interpreter.load
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def run(pointer: Any) -> Any:
        shape = pointer.data.shape
        if shape not in known:
            known[shape] = np.ones(shape, np.bool_), np.zeros(shape, wanted)
        return unchecked_handle(memory.load(pointer.data, *known[shape], wanted, load), dtype)

    return run


def _load_masked(step: BuilderCall) -> Shortcut:
    dtype, wanted, load = step.made.dtype, step.made.data.dtype, interpreter._interpreter.load
    if step.args[2] is None:
        return lambda pointer, mask: unchecked_handle(
            memory.load(pointer.data, mask.data, np.zeros_like(pointer.data, dtype=wanted), wanted, load), dtype
        )
    return lambda pointer, mask, other: unchecked_handle(
        memory.load(pointer.data, mask.data, other.data, wanted, load), dtype
    )


def _store_masked(step: BuilderCall) -> Shortcut:
    store = interpreter._interpreter.store
    return lambda pointer, value, mask: memory.store(pointer.data, value.data, mask.data, store)


_SHORTCUTS: dict[str, Callable[[BuilderCall], Shortcut | None]] = {
    "binary_op": _binary,
    "create_ashr": _shift_right,
    "cast_impl": _cast,
    "create_addptr": _advance,
    "create_bitcast": _bitcast,
    "create_broadcast": _broadcast,
    "create_expand_dims": _expand_dims,
    "create_idiv": _divide_integers,
    "create_load": _load,
    "create_masked_load": _load_masked,
    "create_masked_store": _store_masked,
    "ternary_op": _ternary,
    "unary_op": _unary,
}
