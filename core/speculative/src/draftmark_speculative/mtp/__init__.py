"""Drafting with the model's own layer for multi-token prediction (MTP), as DeepSeek V3 has one."""

from .head import MtpHead
from .speculation import Mtp

__all__ = ["Mtp", "MtpHead"]
