"""Triton's interpreter with its bookkeeping done once instead of at every operation.

Of an interpreted kernel's time most goes to describing values, not to computing them. Results stay the same bit by bit,
but for bf16's subnormals, which now are right. What is replaced of the interpreter is private to Triton: where such a
name has gone, nothing is replaced. Of the language it is how `block_type` and `tensor` are made, in the whole process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any


@cache
def speed_up_interpreter() -> None:
    """Replace, once a process."""
    from triton.language import core
    from triton.runtime import interpreter

    _skip_idle_checks(interpreter)
    _remember_numpy_types(interpreter)
    _remember_block_types(core)
    _remember_shapes(core)
    _shift_bfloat16(interpreter, core)


def _skip_idle_checks(interpreter: Any) -> None:
    """Without debug mode an overflow check of each integer operation is computed, and its result dropped."""
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if not is_dataclass(options) or isinstance(options, type):
        return
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = replace(options, sanitize_overflow=False)


def _remember_numpy_types(interpreter: Any) -> None:
    """A table of twenty types is built for each look-up."""
    look_up: Callable[[Any], Any] | None = getattr(interpreter, "_get_np_dtype", None)
    if look_up is None:
        return
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        name = dtype.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


def _remember_block_types(core: Any) -> None:
    """A type is checked and named whenever a value gets it; only the element type may differ under one name."""
    create = core.block_type.__init__
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        try:
            key = (element_ty.name, *(side.value if isinstance(side, core.constexpr) else side for side in shape))
            found = known.get(key)
        except (AttributeError, TypeError):
            create(self, element_ty, shape)
            return
        if found is None:
            create(self, element_ty, shape)
            known[key] = dict(vars(self))
        else:
            vars(self).update(found, element_ty=element_ty)

    core.block_type.__init__ = remembered


def _remember_shapes(core: Any) -> None:
    """A value wraps each side of its shape anew; all values of one type have the same."""
    create = core.tensor.__init__
    known: dict[str, dict[str, Any]] = {}

    def remembered(self: Any, handle: Any, type: Any) -> None:
        found = known.get(type.name)
        if found is None:
            create(self, handle, type)
            known[type.name] = dict(vars(self))
        else:
            vars(self).update(found, handle=handle, type=type, dtype=type.scalar)

    core.tensor.__init__ = remembered


def _shift_bfloat16(interpreter: Any, core: Any) -> None:
    """bf16 is the upper half of fp32; the general conversion takes both apart, and flushes or cuts subnormals."""
    convert = getattr(interpreter, "_convert_float", None)
    if convert is None:
        return

    def shifted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == core.bfloat16 and target == core.float32:
            return data.view("uint16").astype("uint32") << 16
        if source == core.float32 and target == core.bfloat16 and rounding is None:
            return (data.view("uint32") >> 16).astype("uint16")
        return convert(data, source, target, rounding)

    interpreter._convert_float = shifted
