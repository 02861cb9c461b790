"""Switch of guard mode (DRAFTMARK_GUARD), and the seam to its checks.

Checks of shapes, types and host numbers are free and always run; they are part of this package. Checks of a tensor's
contents read the device, so they run in guard mode only, and only in eager steps. They are in the package
`draftmark_tools.guard` of the distribution draftmark, which test runs install and a production engine need not.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch

from .errors import DraftmarkError
from .graphs.active import is_recording, late_device

GUARD_VARIABLE = "DRAFTMARK_GUARD"
CHECKS = "draftmark_tools.guard"


def guarding() -> bool:
    """Return True if DRAFTMARK_GUARD turns guard mode on. It is off when unset, empty or 0.

    Raises:
        DraftmarkError: guard mode is on, but its checks are not installed.
    """
    return os.environ.get(GUARD_VARIABLE, "0") not in ("", "0") and bool(guard_checks())


def guard_checks() -> Any:
    """Return the package with the checks of guard mode.

    Raises:
        DraftmarkError: it is not installed.
    """
    try:
        return import_module(CHECKS)
    except ModuleNotFoundError as error:
        if error.name is None or not CHECKS.startswith(error.name):
            raise
        raise DraftmarkError(
            f"guard mode needs {CHECKS}, which is not installed; run `pip install draftmark`, or unset "
            f"{GUARD_VARIABLE} and leave out guard=True and checked=True"
        ) from error


def value_checks(device: torch.device) -> Any | None:
    """Return the package with the checks if guard mode is on and they may read `device` now; otherwise None."""
    return guard_checks() if guarding() and readable(device) else None


def readable(device: torch.device) -> bool:
    """Return True if the host may read the device now: no capture runs, and no simulated late device has work."""
    if is_recording() or late_device() is not None:
        return False
    if device.type == "cpu":
        return True
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return capturing is None or not capturing()
