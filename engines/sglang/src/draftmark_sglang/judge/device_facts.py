"""What SGLang decides by the device, set to what it decides on CUDA, for that is what is judged."""

from __future__ import annotations

import importlib
from typing import Any


def full_masks() -> None:
    """Let verification use masks of prefix and drafts: on a CPU SGLang has them for the drafts alone, for AMX kernels.

    Its Triton kernels read the former.
    """
    try:
        masks: Any = importlib.import_module("sglang.srt.layers.attention.verify_mask")
    except ImportError:
        return  # an older release, which has one kind
    masks.default_tree_mask_mode = lambda: masks.TreeMaskMode.FULL_MASK
