"""The emulator's call log, taken at the C boundary, after torch_npu's own wrapper."""

import ctypes
from contextlib import contextmanager


def _runtime():
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.emulatorLog.restype = runtime.emulatorBrokenFence.restype = ctypes.c_char_p
    return runtime


@contextmanager
def calls():
    """A list that holds, afterwards, what the runtime was asked inside."""
    import torch

    runtime, found = _runtime(), []
    torch.npu.synchronize()
    runtime.emulatorKeepLog(1)
    try:
        yield found
    finally:
        torch.npu.synchronize()
        found.extend(runtime.emulatorLog().decode().splitlines())
        runtime.emulatorKeepLog(0)


def broken_fence() -> str:
    """Which device allocation was written past its end; empty for none."""
    return _runtime().emulatorBrokenFence().decode()
