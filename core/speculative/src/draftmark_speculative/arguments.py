"""What an argument must be, said in one way: the field, the value, the limit, the remedy."""

from __future__ import annotations

import math
from operator import index
from typing import Any

from draftmark import RequestError

LARGEST = 2**31 - 1
"""Of any count or size: beyond it torch says that its own integers overflow."""


def check_count(name: str, value: object, least: int, most: int, remedy: str) -> None:
    """Refuse what is no integer of a range; True is none, and neither is 2.0.

    Raises:
        RequestError: it is another type, or out of range.
    """
    if not is_count(value) or not least <= value <= most:  # type: ignore[operator]
        raise RequestError(f"{name} is {value!r}, but it must be an integer of {least} … {most}; {remedy}")


def check_kind(name: str, value: object, kind: Any, what: str, remedy: str) -> None:
    """Refuse an object of another class.

    Raises:
        RequestError: it is one; `what` says what it must be.
    """
    if not isinstance(value, kind):
        raise RequestError(f"{name} is {value!r}, but it must be {what}; {remedy}")


def is_count(value: object) -> bool:
    """Whether it is an integer; True is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether it is a finite number; True is none."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def integer(value: Any) -> int:
    """An integer, whatever holds it (an array's or a tensor's element); True is none.

    Raises:
        TypeError: it is no integer.
    """
    if isinstance(value, bool):
        raise TypeError(f"{value} is a switch")
    return index(value)
