"""Integer arithmetic that also runs on symbols: what every formula and every plugin's sizing is written in.

The types say ``int``, for that is what a caller holds; a proof passes symbolic integers that behave like them.
"""

from __future__ import annotations

from collections.abc import Callable


def ceil_div(a: int, b: int) -> int:
    """The smallest integer >= a / b, for a >= 0 and b >= 1."""
    return (a + b - 1) // b


def maximum(first: int, *rest: int) -> int:
    """The largest of some integers; symbolic ones bring their own ``__dm_max__``."""
    for value in rest:
        first = _binary("__dm_max__", max, first, value)
    return first


def minimum(first: int, *rest: int) -> int:
    """The smallest of some integers; symbolic ones bring their own ``__dm_min__``."""
    for value in rest:
        first = _binary("__dm_min__", min, first, value)
    return first


def _binary(method: str, plain: Callable[[int, int], int], a: int, b: int) -> int:
    for symbol, other in ((a, b), (b, a)):
        if hasattr(symbol, method):
            found: int = getattr(symbol, method)(other)
            return found
    return plain(a, b)
