"""Limits the time of one item, for plugins that hang in Python code."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LIMIT_S = 600.0
"""Seconds for one item, and for loading a plugin. This is ten times the slowest item on an idle machine, which compiles
with a vendor's compiler for a minute. A busy machine must not fail a correct item."""
_AGAIN_S = 0.5


class TimeLimit(BaseException):
    """The item took too long. It is not an `Exception`, so that a plugin's ``except Exception`` does not catch it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimit` in the main thread after `seconds`, and repeatedly until it stops the item.

    There is no limit without SIGALRM or outside the main thread. A hang in native code is not interrupted;
    `draftmark contract` kills such a process and continues with the next item.
    """
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(signum: int, frame: FrameType | None) -> None:
        raise TimeLimit(f"took longer than {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, expire)
    before = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        if before[0]:  # Restore an earlier alarm, e.g. of a vendor's test runner.
            signal.setitimer(signal.ITIMER_REAL, *before)
