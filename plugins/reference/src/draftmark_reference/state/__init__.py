"""Recurrent layers of the reference in plain torch, with two ways to take rejected rows back.

Both never read the device, and have static shapes, so graphs record them.
"""

from .replay import ReplayState
from .snapshots import SnapshotState

__all__ = ["ReplayState", "SnapshotState"]
