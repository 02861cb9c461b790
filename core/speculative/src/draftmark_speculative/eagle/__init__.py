"""EAGLE-style drafting: a one-layer head that reads the target's hidden states and grows a tree on the device."""

from .config import HeadConfig
from .head import DraftHead
from .layer import dense_attention
from .speculation import Eagle

__all__ = ["DraftHead", "Eagle", "HeadConfig", "dense_attention"]
