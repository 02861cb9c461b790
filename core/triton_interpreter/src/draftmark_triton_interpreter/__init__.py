"""Faster execution of Triton kernels in Triton's interpreter, for CPU tensors. Importing this module loads no Triton.

A host that defines kernels with TRITON_INTERPRET=1 calls `prepare` before the definition and `speed_up` after it.
"""

from __future__ import annotations

from types import ModuleType

from .patches import speed_up_interpreter

__all__ = ["prepare", "speed_up"]


def prepare() -> None:
    """Patch Triton's interpreter, once a process; see `patches`."""
    speed_up_interpreter()


def speed_up(module: ModuleType) -> None:
    """Replace the interpreted kernels of a module by `programs.InterpretedKernel`."""
    from .programs import use_fast_launch

    use_fast_launch(module)
