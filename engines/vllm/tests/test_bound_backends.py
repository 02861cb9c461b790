"""Kernels of every geometry are ready before vLLM's first step: `BoundBackends` prepares them, then opens backends."""

from __future__ import annotations

from typing import Any

import torch

from draftmark import AttentionShape, DeviceProfile, load
from draftmark_engines import EngineLimits
from draftmark_vllm.bound_backends import BoundBackends

SHAPES = (AttentionShape(8, 2, 64, 16), AttentionShape(8, 2, 64, 16, window_left=127))
LIMITS = EngineLimits(max_num_reqs=8, max_model_len=512, max_num_tokens=256, num_draft_tokens=5, row_budgets=(16,))


def test_kernels_are_prepared_before_the_first_backend_opens(opening_order: list[tuple[str, Any]]) -> None:
    """One call prepares the kernels of all shapes, decode and EXTEND together; every opened geometry is among them."""
    bound = BoundBackends(load("cuda_triton"), SHAPES, LIMITS, DeviceProfile("cuda", 90, 132), torch.device("cpu"))
    (name, prepared), *after = opening_order
    assert name == "prepare" and prepared == [one for both in bound.geometries.values() for one in both.each()]
    opened = [geometry for name, geometry in after if name == "bind"]
    assert len(opened) == len(prepared) == 2 * len(SHAPES) and all(one in prepared for one in opened)
    assert "prepare" not in [name for name, _ in after]
