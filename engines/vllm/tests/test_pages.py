"""Tests of the views of vLLM's KV memory as draftmark's pages."""

from __future__ import annotations

import pytest
import torch

from draftmark_engines import EngineError
from draftmark_vllm.pages import head_slots, kv_cache, store_rows


@pytest.mark.parametrize("heads", [1, 3])
def test_k_and_v_are_rows_of_one_pitch(heads: int) -> None:
    """Each token has all K heads, then all V heads, and every byte of the memory belongs to exactly one head."""
    memory = torch.zeros(4, 16, head_slots(heads), 8)
    cache = kv_cache(memory.transpose(1, 2), heads, None, None)
    assert cache.k.shape == cache.v.shape == (4, 16, heads, 8)
    assert cache.k.stride() == cache.v.stride() == (16 * 2 * heads * 8, 2 * heads * 8, 8, 1)
    cache.k.add_(1), cache.v.add_(2)
    assert memory[2, 5].flatten().tolist() == [1.0] * heads * 8 + [2.0] * heads * 8


@pytest.mark.parametrize("heads", [1, 3])
def test_k_and_v_may_be_separate(heads: int) -> None:
    """With separate K and V, K of all pages is contiguous, V follows, and every byte belongs to exactly one of them."""
    memory = torch.zeros(2, 4, 16, heads * 8)
    cache = kv_cache(memory.transpose(0, 1), heads, None, None)
    assert cache.k.shape == cache.v.shape == (4, 16, heads, 8)
    assert cache.k.is_contiguous() and cache.v.is_contiguous()
    cache.k.add_(1), cache.v.add_(2)
    assert bool((memory[0] == 1).all()) and bool((memory[1] == 2).all())


def test_pages_with_gaps_need_strided_kv() -> None:
    """Views of pages with gaps (Mamba models) skip the gaps. A backend that needs contiguous K and V gets an error."""
    separate_halves = torch.zeros(4 * 1000).as_strided((4, 4, 16, 8), (1000, 8, 32, 1))
    assert kv_cache(separate_halves, 2, None, None).k.stride() == (1000, 32, 8, 1)
    whole = torch.zeros(2 * 4 * 1000).as_strided((4, 2, 16, 24), (1000, 4000, 24, 1))
    with pytest.raises(EngineError, match="stride of 1000 elements"):
        kv_cache(whole, 3, None, None)


def test_fp8_pages_may_have_dtype_uint8() -> None:
    """If the layer has fp8 scales, pages of dtype uint8 are viewed as e4m3."""
    memory, scale = torch.zeros(2, 16, 4, 8, dtype=torch.uint8), torch.tensor(0.5)
    cache = kv_cache(memory.transpose(1, 2), 2, scale, scale)
    assert cache.k.dtype is torch.float8_e4m3fn and cache.k_scale is not None and cache.k_scale.shape == (1,)
    assert cache.k.data_ptr() == memory.data_ptr()


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_are_stored_at_their_slots(fp8: bool) -> None:
    """`store_rows` writes K and V at each slot and nowhere else; a row with slot -1 goes to the null page."""
    scale = torch.tensor(0.5) if fp8 else None
    dtype = torch.uint8 if fp8 else torch.float32
    cache = kv_cache(torch.zeros(3, 16, head_slots(2), 8, dtype=dtype).transpose(1, 2), 2, scale, scale)
    key = torch.arange(3 * 2 * 8).view(3, 2, 8).div(16)
    store_rows(cache, key, -key, torch.tensor([17, -1, 47]))
    found = [cache.k.float() / (1 if scale is None else 2), cache.v.float() / (1 if scale is None else 2)]
    for pages, sign in zip(found, (1, -1), strict=True):
        stored = pages.flatten(0, 1)
        assert torch.allclose(stored[[17, 47]], sign * key[[0, 2]], rtol=0.07)
        assert not stored[16].any() and not stored[18:47].any() and not stored[1:16].any()


def test_triton_can_load_pages_by_tma() -> None:
    """TMA can load draftmark's pages, which have one row pitch. It cannot load pages with K and V side by side."""
    pytest.importorskip("triton")
    from draftmark_cuda_triton.prefill import has_uniform_row_stride

    ours = kv_cache(torch.zeros(4, 64, head_slots(2), 64, dtype=torch.bfloat16).transpose(1, 2), 2, None, None)
    assert has_uniform_row_stride(ours.k, ours.v)
    beside = torch.zeros(4, 64, 2, 128, dtype=torch.bfloat16)
    assert not has_uniform_row_stride(beside[..., :64], beside[..., 64:])
