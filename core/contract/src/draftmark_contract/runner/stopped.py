"""Errors for faults of the machine, not of the backend, that end a run without a verdict."""

from __future__ import annotations

import signal

WITHOUT_VERDICT = 2
"""Exit code of a run without a verdict."""
INTERRUPTED = "the run was interrupted"
_FROM_OUTSIDE = {
    getattr(signal, name): name
    for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGXFSZ")
    if hasattr(signal, name)
}
"""Signals that other processes or the system send; a crash in native code ends with another signal."""
_OUT_OF_MEMORY = ", as the kernel's out-of-memory killer does; use fewer --workers, or a machine with more memory"


class RunStopped(Exception):
    """The run cannot go on. The message is a clause that continues "has no verdict, because"."""


class MemoryRanOut(RunStopped):
    """Memory of the machine or the device ran out in an item. The item may have enough without other processes."""


def killed_from_outside(code: int | None, where: str) -> str:
    """Return as a clause which outside signal ended a process of the run; "" if the backend may have ended it.

    Args:
        code: exit code of the process as `subprocess` gives it; None if it is unknown.
        where: item that the process was running, or "".
    """
    name = _FROM_OUTSIDE.get(-code) if code is not None and code < 0 else None
    if name is None:
        return ""
    during = f" during {where}" if where else ""
    return f"{name} ended a process of the run{during}" + (_OUT_OF_MEMORY if name == "SIGKILL" else "")
