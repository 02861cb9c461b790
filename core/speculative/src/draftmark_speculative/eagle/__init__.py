"""EAGLE-style drafting: a one-layer head reads the target's hidden states and builds a draft tree on the device."""

from .config import HeadConfig
from .head import DraftHead
from .layer import dense_attention
from .speculation import Eagle

__all__ = ["DraftHead", "Eagle", "HeadConfig", "dense_attention"]
