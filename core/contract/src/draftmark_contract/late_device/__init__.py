"""Simulation, on the CPU, of a device that runs its work late; for the `late` checks and tests of plugins."""

from .device import LateDevice
from .task_queue import FAILED

__all__ = ["FAILED", "LateDevice"]
