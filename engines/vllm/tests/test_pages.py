"""Views of vLLM's KV memory."""

from __future__ import annotations

import pytest
import torch

from draftmark_engines import EngineError
from draftmark_vllm.pages import head_slots, kv_cache


@pytest.mark.parametrize("heads", [1, 3])
def test_k_and_v_are_rows_of_one_pitch(heads: int) -> None:
    """Of each token K heads lie together, then V heads, and every byte belongs to exactly one of them."""
    memory = torch.zeros(4, 16, head_slots(heads), 8)
    cache = kv_cache(memory.transpose(1, 2), heads, None, None)
    assert cache.k.shape == cache.v.shape == (4, 16, heads, 8)
    assert cache.k.stride() == cache.v.stride() == (16 * 2 * heads * 8, 2 * heads * 8, 8, 1)
    cache.k.add_(1), cache.v.add_(2)
    assert memory[2, 5].flatten().tolist() == [1.0] * heads * 8 + [2.0] * heads * 8


@pytest.mark.parametrize("heads", [1, 3])
def test_k_may_lie_apart_from_v(heads: int) -> None:
    """Of all pages K comes first, then V: both are contiguous, and every byte belongs to exactly one of them."""
    memory = torch.zeros(2, 4, 16, heads * 8)
    cache = kv_cache(memory.transpose(0, 1), heads, None, None)
    assert cache.k.shape == cache.v.shape == (4, 16, heads, 8)
    assert cache.k.is_contiguous() and cache.v.is_contiguous()
    cache.k.add_(1), cache.v.add_(2)
    assert bool((memory[0] == 1).all()) and bool((memory[1] == 2).all())


def test_pages_that_lie_apart_have_no_whole_k() -> None:
    """Beside a Mamba layer's states a page has room that no attention uses; views of packed pages skip it."""
    apart = torch.zeros(4 * 1000).as_strided((4, 4, 16, 8), (1000, 8, 32, 1))
    assert kv_cache(apart, 2, None, None).k.stride() == (1000, 32, 8, 1)
    whole = torch.zeros(2 * 4 * 1000).as_strided((4, 2, 16, 24), (1000, 4000, 24, 1))
    with pytest.raises(EngineError, match="1000 elements from page to page"):
        kv_cache(whole, 3, None, None)


def test_fp8_may_come_as_bytes() -> None:
    """With scales the pages are e4m3, however vLLM types them."""
    memory, scale = torch.zeros(2, 16, 4, 8, dtype=torch.uint8), torch.tensor(0.5)
    cache = kv_cache(memory.transpose(1, 2), 2, scale, scale)
    assert cache.k.dtype is torch.float8_e4m3fn and cache.k_scale is not None and cache.k_scale.shape == (1,)
    assert cache.k.data_ptr() == memory.data_ptr()


def test_triton_reads_them_through_the_copy_engine() -> None:
    """A box describes rows of one pitch; it does not describe K beside V of the same head."""
    pytest.importorskip("triton")
    from draftmark_cuda_triton.extend import has_one_pitch

    ours = kv_cache(torch.zeros(4, 64, head_slots(2), 64, dtype=torch.bfloat16).transpose(1, 2), 2, None, None)
    assert has_one_pitch(ours.k, ours.v)
    beside = torch.zeros(4, 64, 2, 128, dtype=torch.bfloat16)
    assert not has_one_pitch(beside[..., :64], beside[..., 64:])
