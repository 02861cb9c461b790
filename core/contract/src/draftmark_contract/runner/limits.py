"""A time limit for one item, for plugins that hang in Python."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

LIMIT_S = 600.0
"""Of one item, and of loading a plugin: ten times what the slowest takes on a quiet machine (a minute, in which a
vendor's compiler runs). It ends what hangs; a busy machine must not fail an honest item."""
_AGAIN_S = 0.5


class TimeLimit(BaseException):
    """The item took too long. Not an `Exception`, so that a plugin's ``except Exception`` does not swallow it."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeLimit` in the main thread after `seconds`, and again until it gets through.

    Without SIGALRM, or outside the main thread, there is no limit; a hang in native code is not interrupted
    (`draftmark contract` ends such a process and goes on with the next item).
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
        if before[0]:  # somebody else's alarm, pytest-timeout's for one
            signal.setitimer(signal.ITIMER_REAL, *before)
