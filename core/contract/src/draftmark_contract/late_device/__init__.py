"""Simulates, on the CPU, a device that runs its work late; used by the `late` checks and the tests of plugins."""

from .device import LateDevice
from .task_queue import FAILED

__all__ = ["FAILED", "LateDevice"]
