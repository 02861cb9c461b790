"""Change of device-dependent SGLang settings: on a CPU the judge uses the values that SGLang has on CUDA."""

from __future__ import annotations

import importlib
from typing import Any


def full_masks() -> None:
    """Make SGLang build verify masks with columns for prefix and draft tokens, which its Triton kernels read.

    On a CPU SGLang would build masks with columns for draft tokens only, for its AMX kernels.
    """
    try:
        masks: Any = importlib.import_module("sglang.srt.layers.attention.verify_mask")
    except ImportError:
        return  # Older releases have no choice of masks: their masks always have columns for the prefix.
    masks.default_tree_mask_mode = lambda: masks.TreeMaskMode.FULL_MASK
