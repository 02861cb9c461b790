"""Tests of the choice of query dtypes in which the judge tests a vLLM backend."""

from __future__ import annotations

import pytest
import torch

from draftmark_vllm_judge.target import query_dtypes

SERVED = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize(
    ("on_gpu", "names"), [(True, ("float16", "bfloat16")), (False, ("float16", "bfloat16", "float32"))]
)
def test_float32_is_left_out_on_a_gpu(on_gpu, names):
    """The judge tests float32 on a CPU only: on a GPU Triton rounds float32 products to TF32, an error of 1e-3."""
    assert query_dtypes(SERVED, on_gpu) == names
    assert query_dtypes([torch.bfloat16], on_gpu) == ("bfloat16",)
