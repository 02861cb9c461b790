"""Call log of the emulator, recorded at the C boundary below torch_npu."""

import ctypes
from contextlib import contextmanager


def _runtime():
    runtime = ctypes.CDLL("libascendcl.so")
    runtime.emulatorLog.restype = runtime.emulatorBrokenFence.restype = ctypes.c_char_p
    return runtime


@contextmanager
def calls():
    """Yield a list; after the block it has the runtime calls made in the block."""
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
