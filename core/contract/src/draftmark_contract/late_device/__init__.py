"""A device that is late, on the CPU: what the `late` checks run rounds on, and what a plugin's own tests may use."""

from .device import LateDevice
from .task_queue import FAILED

__all__ = ["FAILED", "LateDevice"]
