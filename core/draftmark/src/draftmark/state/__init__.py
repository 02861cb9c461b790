"""Recurrent state on the device: pool, checkpoints and the interface of a backend."""

from .backend import StateBackend
from .checkpoints import checkpoint_lens
from .pool import StateCache, StatePool

__all__ = ["StateBackend", "StateCache", "StatePool", "checkpoint_lens"]
