"""Tests whether guard mode is on (DRAFTMARK_GUARD), and whether its checks may read the device now."""

from __future__ import annotations

import os

import torch

from ..graphs import is_recording, late_device

GUARD_VARIABLE = "DRAFTMARK_GUARD"


def guarding() -> bool:
    """Return True if DRAFTMARK_GUARD turns guard mode on. It is off when unset, empty or 0."""
    return os.environ.get(GUARD_VARIABLE, "0") not in ("", "0")


def readable(device: torch.device) -> bool:
    """Return True if the host may read the device now: no capture runs, and no simulated late device has work."""
    if is_recording() or late_device() is not None:
        return False
    if device.type == "cpu":
        return True
    capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return capturing is None or not capturing()
