"""Settings that SGLang derives from the device, changed on a CPU to the values for CUDA, which are judged."""

from __future__ import annotations

import importlib
from typing import Any


def full_masks() -> None:
    """Make verification use masks of prefix and drafts, which SGLang's Triton kernels read.

    On a CPU SGLang uses masks of the drafts only, for its AMX kernels.
    """
    try:
        masks: Any = importlib.import_module("sglang.srt.layers.attention.verify_mask")
    except ImportError:
        return  # older releases always use masks of prefix and drafts
    masks.default_tree_mask_mode = lambda: masks.TreeMaskMode.FULL_MASK
