"""Drafting with the model's own layers for multi-token prediction (MTP): one, as in DeepSeek V3, or several."""

from .head import MtpHead
from .speculation import Mtp, MtpModules

__all__ = ["Mtp", "MtpHead", "MtpModules"]
