"""Argument checks with one error format: field, value, limit, remedy."""

from __future__ import annotations

import math
from operator import index
from typing import Any

from draftmark import RequestError

LARGEST = 2**31 - 1
"""Largest accepted count or size; torch's integers overflow beyond it."""


def check_count(name: str, value: object, least: int, most: int, remedy: str) -> None:
    """Raise an error unless `value` is an integer from `least` to `most`; True and 2.0 are not integers.

    Raises:
        RequestError: the value has another type or is out of range.
    """
    if not is_count(value) or not least <= value <= most:  # type: ignore[operator]
        raise RequestError(f"{name} is {value!r}, but it must be an integer of {least} … {most}; {remedy}")


def check_kind(name: str, value: object, kind: Any, what: str, remedy: str) -> None:
    """Raise an error unless `value` is an instance of `kind`.

    Raises:
        RequestError: the value is another object; `what` is the expected kind in words.
    """
    if not isinstance(value, kind):
        text = " ".join(repr(value).split())  # a torch module's repr has many lines
        raise RequestError(f"{name} is {text if len(text) <= 60 else text[:59] + '…'}, but it must be {what}; {remedy}")


def is_count(value: object) -> bool:
    """Return True if `value` is an integer; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Return True if `value` is a finite number; a bool is not."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # the integer is too large for a float
        return False


def integer(value: Any) -> int:
    """Return an integer, which may be an element of an array or tensor; a bool is not an integer.

    Raises:
        TypeError: the value is not an integer.
    """
    if isinstance(value, bool):
        raise TypeError(f"{value} is a bool")
    return index(value)
