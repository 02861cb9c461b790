"""New K and V rows are written to their slots only."""

from __future__ import annotations

import pytest
import torch

from plugins.cuda_triton.tests import helpers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_written_to_their_slots(dtype):
    """K and V rows with strides are written to their slots in one launch, and every other byte is unchanged."""
    from draftmark_cuda_triton.kv_write import write_kv

    qkv = torch.randn(6, 5, 2, 80, device=helpers.DEVICE).to(dtype)
    k, v = qkv[:, 1], qkv[:, 3]
    k_cache, v_cache = (torch.randn(4, 16, 2, 80, device=helpers.DEVICE).to(dtype) for _ in range(2))
    slots = torch.tensor([17, 0, 63, 5, 32, 31], device=helpers.DEVICE)
    expected = [cache.clone() for cache in (k_cache, v_cache)]
    for cache, rows in zip(expected, (k, v), strict=True):
        cache.view(64, 2, 80)[slots] = rows
    write_kv(k, v, k_cache, v_cache, None, None, slots)
    assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])


def test_fp8_is_scaled_and_saturates():
    """A stored value times its scale is the real value; values outside e4m3's range saturate and never become NaN."""
    from draftmark_cuda_triton.kv_write import write_kv

    k = torch.tensor([1.0, -3.0, 1000.0, 0.3], device=helpers.DEVICE).repeat(16).view(1, 1, 64).to(torch.bfloat16)
    caches = [torch.zeros(2, 4, 1, 64, device=helpers.DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
    scales = [torch.tensor([s], device=helpers.DEVICE) for s in (0.5, 2.0)]
    slots = torch.tensor([6], device=helpers.DEVICE)
    write_kv(k, k, *caches, *scales, slots)
    for cache, scale in zip(caches, scales, strict=True):
        stored = cache[1, 2, 0].float()
        expected = (k[0, 0].float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
        assert torch.equal(stored, expected)
        assert int((cache.float() != 0).sum()) == 64


def test_fp8_is_rounded_to_nearest_even():
    """Normal and subnormal numbers, ties, and carries into the exponent are rounded exactly as in torch."""
    from draftmark_cuda_triton.kv_write import write_kv

    values = [torch.randn(2048) * scale for scale in (1.0, 0.01, 300.0)] + [torch.arange(-512, 512) * 2.0**-10]
    k = torch.cat(values).to(torch.bfloat16).view(-1, 1, 64).to(helpers.DEVICE)
    caches = [torch.zeros(len(k), 1, 1, 64, device=helpers.DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
    one = torch.ones(1, device=helpers.DEVICE)
    write_kv(k, k, *caches, one, one, torch.arange(len(k), device=helpers.DEVICE))
    expected = k.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(caches[0][:, 0].view(torch.uint8), expected.view(torch.uint8))
