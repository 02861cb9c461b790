"""Access to the emulator's log of runtime calls, which it records at the C interface below torch_npu."""

import ctypes
from contextlib import contextmanager


def _runtime():
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.emulatorLog.restype = runtime.emulatorBrokenFence.restype = ctypes.c_char_p
    return runtime


@contextmanager
def calls():
    """Yield a list. When the context ends, the list has the runtime calls that were made inside it."""
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
    """Return the device allocation that was written past its end; an empty string if there is none."""
    return _runtime().emulatorBrokenFence().decode()
