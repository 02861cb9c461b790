"""Fake driver of an absent GPU: kernels compile to machine code, and launches are recorded, not run."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


class Utils:
    """Fakes the driver utilities that Triton calls to load a kernel."""

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Return module, function, registers, spilled bytes and maximum threads."""
        assert binary
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Return the properties of an H200."""
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32, "max_num_regs": 65536}

    def unload_module(self, module: int) -> None:
        """Do nothing, since no module was loaded."""


class FakeDriver:
    """Fake driver of an absent GPU: kernels are compiled to machine code, and launches are recorded, not run.

    Triton ships its own assembler, so compilation is tested on any machine.

    Attributes:
        launched: source and arguments of each launch, in order.
    """

    def __init__(self, arch: int) -> None:
        self.utils, self.launched, self._arch = Utils(), [], arch
        self.launcher_cls = self._launcher

    def _launcher(self, source: Any, metadata: Any) -> Any:
        return lambda *arguments: self.launched.append((source, arguments))

    def get_current_target(self) -> GPUTarget:
        """Return a CUDA target with warps of 32 threads."""
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        """Return the index of the only device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Return the CPU, where the tensors are."""
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        """Return a placeholder, because nothing is timed."""
        return torch.cuda


def functions_of(package: ModuleType) -> list[JITFunction]:
    """Return every kernel of a package and the functions that the kernels call."""
    modules = [one for one in vars(package).values() if isinstance(one, ModuleType)]
    return [function for one in modules for function in vars(one).values() if isinstance(function, JITFunction)]
