"""Which device this process has: an Ascend NPU, or the emulator that stands for one in the tests."""

from __future__ import annotations

import ctypes

EMULATED = "emulated, not hardware"
RUNTIME = "libascendcl.so"
MARK = "draftmarkEmulatorVersion"
"""A function that the emulator's runtime has and no vendor's."""


def stamp() -> str:
    """What every result must say of where it was made: the device's name, or that it is none.

    Whatever cannot be told to be hardware is not hardware.
    """
    try:
        runtime = ctypes.CDLL(RUNTIME)
    except OSError:
        return f"no device: {RUNTIME} is not found"
    if hasattr(runtime, MARK):
        return EMULATED
    import torch_npu

    if not torch_npu.npu.is_available():
        return "no device: torch_npu sees none"
    return str(torch_npu.npu.get_device_name())


def require_hardware(what: str) -> str:
    """The device's name.

    Raises:
        RuntimeError: there is none, so `what` would say nothing.
    """
    found = stamp()
    if found == EMULATED or found.startswith("no device"):
        raise RuntimeError(f"{what} means nothing here ({found}); run it on an Ascend NPU with CANN")
    return found
