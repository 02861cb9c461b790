"""Integer arithmetic that also runs on symbols: what every formula and every plugin's sizing is written in."""

from __future__ import annotations

from typing import Any


def ceil_div(a: Any, b: Any) -> Any:
    """The smallest integer >= a / b, for a >= 0 and b >= 1; ints or symbolic integers."""
    return (a + b - 1) // b


def maximum(first: Any, *rest: Any) -> Any:
    """Maximum of ints or symbolic integers (which bring their own through ``__dm_max__``)."""
    result = first
    for value in rest:
        result = _binary("__dm_max__", max, result, value)
    return result


def minimum(first: Any, *rest: Any) -> Any:
    """Minimum of ints or symbolic integers (which bring their own through ``__dm_min__``)."""
    result = first
    for value in rest:
        result = _binary("__dm_min__", min, result, value)
    return result


def _binary(method: str, plain: Any, a: Any, b: Any) -> Any:
    for symbol, other in ((a, b), (b, a)):
        if hasattr(symbol, method):
            return getattr(symbol, method)(other)
    return plain(a, b)
