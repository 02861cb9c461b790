"""Recurrent state on the device: pool, slots, checkpoints and the interface of a backend."""

from .backend import StateBackend
from .checkpoints import checkpoint_lens
from .pool import StateCache, StatePool
from .slots import StateSlots

__all__ = ["StateBackend", "StateCache", "StatePool", "StateSlots", "checkpoint_lens"]
