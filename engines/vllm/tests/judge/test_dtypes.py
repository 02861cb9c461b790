"""In which dtypes a backend of vLLM is asked."""

from __future__ import annotations

import pytest
import torch

from draftmark_vllm.judge.target import asked_dtypes

SERVED = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("on_gpu", "names"), [(True, ("float16", "bfloat16")), (False, ("float16", "bfloat16", "float32"))]
)
def test_float32_is_not_asked_where_products_may_be_rounded_to_tf32(on_gpu, names):
    """TRITON_ATTN on an H200 differed by 1e-3 in 192 questions of float32, and in none of them otherwise."""
    assert asked_dtypes(SERVED, on_gpu) == names
    assert asked_dtypes([torch.bfloat16], on_gpu) == ("bfloat16",)
