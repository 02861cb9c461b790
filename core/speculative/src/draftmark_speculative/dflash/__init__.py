"""Drafting of whole blocks in one forward of a draft model, as DFlash does, with chains or trees (DDTree)."""

from .head import BlockConfig, BlockHead
from .speculation import DFlash

__all__ = ["BlockConfig", "BlockHead", "DFlash"]
