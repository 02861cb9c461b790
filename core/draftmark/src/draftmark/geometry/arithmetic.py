"""Integer arithmetic that also accepts symbolic integers, for all length formulas and the sizing code of plugins.

The annotations are ``int``, the type that callers use. A proof passes symbolic integers that behave like ``int``.
"""

from __future__ import annotations

from collections.abc import Callable


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer >= a / b, for a >= 0 and b >= 1."""
    return (a + b - 1) // b


def maximum(first: int, *rest: int) -> int:
    """Return the largest argument; a symbolic integer supplies its own ``__dm_max__``."""
    for value in rest:
        if type(first) is int and type(value) is int:  # the usual case, and sizing code runs it millions of times
            first = value if value > first else first
        else:
            first = _binary("__dm_max__", max, first, value)
    return first


def minimum(first: int, *rest: int) -> int:
    """Return the smallest argument; a symbolic integer supplies its own ``__dm_min__``."""
    for value in rest:
        if type(first) is int and type(value) is int:
            first = value if value < first else first
        else:
            first = _binary("__dm_min__", min, first, value)
    return first


def _binary(method: str, plain: Callable[[int, int], int], a: int, b: int) -> int:
    for symbol, other in ((a, b), (b, a)):
        if hasattr(symbol, method):
            found: int = getattr(symbol, method)(other)
            return found
    return plain(a, b)
