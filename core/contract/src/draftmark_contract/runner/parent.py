"""Ends a child process when its parent ends, so that no worker outlives a parent that was killed."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl(2): signal that a process receives when its parent ends."""
_LOOK_S = 0.5


def end_with_parent(parent: int | None = None) -> None:
    """End this process when its parent ends, also after `kill -9` of the parent.

    Linux sends SIGKILL, even if native code hangs here. Elsewhere a thread watches the parent.

    Args:
        parent: process id of the parent; None for the current parent. If the parent has ended, this process ends now.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
