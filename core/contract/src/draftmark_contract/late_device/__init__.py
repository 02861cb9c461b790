"""Simulation of a device that runs late, on the CPU, for the `late` checks and for tests of plugins."""

from .device import LateDevice
from .task_queue import FAILED

__all__ = ["FAILED", "LateDevice"]
