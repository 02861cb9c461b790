"""Patches of Triton's interpreter: no overflow checks, fast conversions of bf16 and 8-bit floats, bounds of loops.

Results are bitwise equal, except that bf16 subnormals become correct. The patched names are private to Triton. A patch
is skipped if its name no longer exists.
"""

from __future__ import annotations

from dataclasses import is_dataclass, replace
from functools import cache
from typing import Any

import numpy as np


@cache
def speed_up_interpreter() -> None:
    """Apply the patches, once a process."""
    from triton.language import core
    from triton.runtime import interpreter

    _skip_idle_checks(interpreter)
    _convert_narrow_floats(interpreter, core)
    _index_by_one_element(interpreter)


def _skip_idle_checks(interpreter: Any) -> None:
    """Disable integer overflow checks: without debug mode the interpreter computes them but discards the result."""
    builder: Any = getattr(interpreter, "interpreter_builder", None)
    options = getattr(builder, "options", None)
    if not is_dataclass(options) or isinstance(options, type):
        return
    if getattr(options, "sanitize_overflow", False) and not getattr(options, "debug", True):
        builder.options = replace(options, sanitize_overflow=False)


def _index_by_one_element(interpreter: Any) -> None:
    """Let a loop end at a scalar of the kernel: Triton 3.6 holds it in a vector, which NumPy 2.4 rejects."""
    patch = getattr(interpreter, "_patch_lang_tensor", None)
    if patch is None:
        return

    def patched(tensor: Any, scope: Any, *rest: Any) -> None:
        patch(tensor, scope, *rest)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


def _convert_narrow_floats(interpreter: Any, core: Any) -> None:
    """Convert bf16 by shifting the upper half of fp32, and 8-bit floats by a table of 256 values.

    The general conversion takes dozens of NumPy operations, and flushes or truncates bf16 subnormals.
    """
    convert = getattr(interpreter, "_convert_float", None)
    if convert is None:
        return
    widened: dict[tuple[str, str, Any], Any] = {}

    def converted(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == core.bfloat16 and target == core.float32:
            return data.view("uint16").astype("uint32") << 16
        if source == core.float32 and target == core.bfloat16 and rounding is None:
            return (data.view("uint32") >> 16).astype("uint16")
        if source.primitive_bitwidth == 8:
            key = source.name, target.name, rounding
            if key not in widened:
                widened[key] = convert(np.arange(256, dtype=np.uint8), source, target, rounding)
            return widened[key][data.view(np.uint8)]
        return convert(data, source, target, rounding)

    interpreter._convert_float = converted
