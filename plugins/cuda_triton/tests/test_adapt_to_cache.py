"""Configurations adapted to the strides of a cache: TMA, gathered keys, merged heads and boxes of a full head."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark_cuda_triton import sizing
from draftmark_cuda_triton.heuristics import select, sm80, sm90, split_kv
from draftmark_cuda_triton.heuristics.common import Kernel, KernelConfig
from draftmark_cuda_triton.launch import tma
from draftmark_cuda_triton.prefill import has_adjacent_heads
from plugins.cuda_triton.tests.shapes import (
    A100,
    B200,
    BF16,
    E4M3,
    FP32,
    H200,
    SOME,
    described,
    gathers,
    shape,
    with_boxes,
)


@pytest.mark.parametrize(
    ("attention", "device", "block_n", "served"),
    [
        (shape(64, page_size=64), H200, 64, True),
        (shape(128, page_size=64), H200, 64, True),
        (shape(256, page_size=128), B200, 64, True),
        (shape(128, page_size=64), A100, 64, False),
        (shape(128, page_size=64), DeviceProfile("cuda", 89, 132), 64, False),
        (shape(128, page_size=64), DeviceProfile("cpu", 90, 1), 64, False),
        (shape(128, page_size=32), H200, 64, False),
        (shape(128, page_size=96), H200, 64, False),
        (shape(80, page_size=64), H200, 64, False),
        (shape(128, E4M3, page_size=64), H200, 64, False),
        (shape(128, FP32, page_size=64), H200, 64, False),
    ],
)
def test_when_generic_kernels_use_tma(attention, device, block_n, served):
    """Generic kernels use TMA from sm_90 on if a KV tile lies in one page, needs no conversion, and has no padding."""
    config = KernelConfig(128, block_n, 4, 3, 2)
    assert sm80.uses_tma(attention, device, config) is served
    for tma_boxes in (False, True):
        found = select.adapt_to_cache(attention, device, config, uniform_stride=True, tma_boxes=tma_boxes)
        assert found == replace(config, kernel=Kernel.BOXES if served else Kernel.POINTERS)
    by_pointer = select.adapt_to_cache(attention, device, config, uniform_stride=False, tma_boxes=True)
    assert by_pointer.kernel is Kernel.POINTERS


def test_cache_without_tma_uses_the_fallback_config():
    """A cache that TMA cannot load keeps tile shape and splits, on which buffers depend, with at most two stages."""
    attention = shape(64, page_size=64)
    config = select.select_config(attention, H200, 65)
    assert select.adapt_to_cache(attention, H200, config, uniform_stride=True, tma_boxes=True) == config
    without = select.adapt_to_cache(attention, H200, config, uniform_stride=False, tma_boxes=False)
    assert without == replace(config, kernel=Kernel.POINTERS, num_consumer_wgs=0, num_stages=2)
    fp8 = select.select_config(shape(256, E4M3), H200, 65)
    assert select.fallback_config(shape(256, E4M3), fp8).num_stages == 1
    gathered = replace(config, kernel=Kernel.SM90_GATHER)
    assert select.fallback_config(shape(128), gathered).kernel is Kernel.POINTERS
    swap_ab = select.select_config(shape(128, E4M3), H200, 16)
    assert select.fallback_config(shape(128, E4M3), swap_ab).kernel is Kernel.POINTERS
    two_parts = select.select_config(shape(160), H200, 129)
    padded = select.fallback_config(shape(160), two_parts)  # the Triton kernels pad 160 columns to 256
    assert (two_parts.num_stages, padded.num_stages) == (2, 1)


@pytest.mark.parametrize(
    ("head_dim", "page_size", "rows", "slow", "fast"),
    [
        *((96, page, rows, True, True) for page in (16, 64) for rows in (1, 64)),
        *((96, page, rows, True, False) for page in (16, 64) for rows in (65, 128)),
        *((96, page, rows, True, True) for page in (1, 12) for rows in (1, 128)),
        *((96, 16, 129, False, False), (128, 16, 65, False, False), (128, 16, 1, False, False)),
        *((128, 1, rows, True, True) for rows in (1, 65, 129)),
    ],
)
def test_fast_memory_keeps_tma_for_two_warp_groups(head_dim, page_size, rows, slow, fast):
    """With fast memory, 65 to 128 packed rows are not gathered from pages that TMA can load; the tile is unchanged."""
    attention = shape(head_dim, BF16, page_size)
    config = select.select_config(attention, H200, rows, num_reqs=SOME)
    for adjacent in (True, False):
        found = [
            select.adapt_to_cache(attention, H200, config, True, True, adjacent, is_fast) for is_fast in (False, True)
        ]
        assert [gathers(one) for one in found] == [slow, fast]
        assert {replace(with_boxes(one), box_full_head=False) for one in found} == {with_boxes(config)}


def test_fast_memory_keeps_tma_for_merged_heads():
    """Two merged heads of 120 are gathered for up to 64 packed rows. For more rows TMA loads them if memory is fast."""
    attention = AttentionShape(32, 8, 120, 64)
    for rows, gather in ((8, True), (16, False)):
        config = select.select_config(attention, H200, rows, num_reqs=64)
        assert config.kv_heads_per_tile == 2 and gathers(config)
        assert select.adapt_to_cache(attention, H200, config, True, True, True, True) == replace(
            config, kernel=Kernel.SM90_GATHER if gather else Kernel.SM90
        )


@pytest.mark.parametrize(
    ("kilohertz", "bits", "fast"), [(3201000, 6144, True), (2619000, 5120, False), (0, 5120, False)]
)
def test_has_fast_memory(kilohertz, bits, fast, monkeypatch):
    """An H200's bandwidth counts as fast, an H100's does not, and unknown values do not."""
    options = SimpleNamespace(memory_clock_rate=kilohertz, memory_bus_width=bits)
    for one in (options, SimpleNamespace()):
        tma.has_fast_memory.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, one=one: one)
        assert tma.has_fast_memory(torch.device("cuda", 0)) is (fast and one is options)
    tma.has_fast_memory.cache_clear()


@pytest.mark.parametrize(
    ("head_dim", "dtypes", "page_size", "rows", "full_head"),
    [
        *((128, BF16, page, rows, True) for page in (8, 16, 64) for rows in (1, 16, 17, 64, 129)),
        (128, BF16, 64, 65, True),
        (128, ("float16",) * 2, 16, 1, True),
        *((head_dim, BF16, 16, 17, False) for head_dim in (64, 96, 120, 136, 256)),
        *((head_dim, E4M3, 16, rows, False) for head_dim in (128, 256) for rows in (1, 65)),
        (128, BF16, 4, 1, False),  # keys are gathered, not loaded by TMA
    ],
)
def test_box_has_a_full_head_of_256_bytes(head_dim, dtypes, page_size, rows, full_head):
    """A box holds one full head of 256 bytes or two merged heads of 128 bytes, if a token's heads are adjacent."""
    attention = shape(head_dim, dtypes, page_size)
    for is_prefill in (False, True):
        config = select.select_config(attention, H200, rows, prefill=is_prefill, num_reqs=SOME)
        found = select.adapt_to_cache(attention, H200, config, True, True)
        assert found == replace(config, box_full_head=full_head)
        assert not select.adapt_to_cache(attention, H200, config, True, True, adjacent_heads=False).box_full_head
        assert not select.fallback_config(attention, found).box_full_head
    two_heads = AttentionShape(8, 8, 64, 16)
    config = select.select_config(two_heads, H200, 1, num_reqs=SOME)
    assert config.kv_heads_per_tile == 2
    assert select.adapt_to_cache(two_heads, H200, config, True, True).box_full_head


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtypes", "page_size", "q_len", "num_reqs", "merged"),
    [
        *((8, head_dim, BF16, 16, 1, 64, True) for head_dim in (40, 48, 64, 72, 80, 96, 104, 120)),
        *((8, head_dim, BF16, 16, 1, 64, False) for head_dim in (128, 136, 160, 256)),
        (8, 64, ("float16",) * 2, 64, 4, 64, True),
        (8, 96, BF16, 64, 4, 64, True),
        (8, 64, BF16, 16, 5, 60, False),  # 40 packed rows of one head, 80 of both, more than a row tile of 64
        (7, 64, BF16, 16, 1, 64, False),
        (8, 64, E4M3, 16, 1, 64, True),
        (8, 96, E4M3, 16, 2, 64, True),
        (8, 96, E4M3, 16, 3, 64, False),  # 24 rows of one head, 48 of both; registers hold only 32
        (8, 128, E4M3, 16, 1, 64, False),
        (8, 64, BF16, 4, 1, 64, True),  # keys are gathered, not loaded by TMA
        (8, 96, BF16, 1, 1, 64, True),
        (8, 64, E4M3, 4, 1, 64, False),
        (8, 64, BF16, 16, 1, 4, False),
        (8, 64, BF16, 16, 1, 5, True),
    ],
)
def test_two_kv_heads_merge_for_few_rows(kv_heads, head_dim, dtypes, page_size, q_len, num_reqs, merged):
    """Two KV heads are processed as one with twice the head_dim, so a split has half the CTAs, and splits double.

    If a cache's heads are not adjacent, they are processed one by one in the same splits, and partial results fit.
    """
    attention = AttentionShape(8 * kv_heads, kv_heads, head_dim, page_size, *dtypes)
    config = select.select_config(attention, H200, q_len, num_reqs=num_reqs)
    assert (config.kv_heads_per_tile == 2) is merged
    assert select.select_config(attention, H200, q_len, prefill=True, num_reqs=num_reqs).kv_heads_per_tile == 1
    if not merged:
        return
    wide_shape = replace(attention, head_dim=2 * head_dim, num_kv_heads=kv_heads // 2)
    # control: one KV head, which cannot be merged
    single_head = AttentionShape(16, 1, 2 * head_dim, page_size, *dtypes)
    wide_config = select.select_config(single_head, H200, q_len if dtypes is E4M3 else 1, num_reqs=num_reqs)
    assert replace(config, kv_heads_per_tile=1) == wide_config
    num_splits = split_kv.choose_num_splits(attention, H200, config, q_len, num_reqs, 4096)
    assert num_splits == split_kv.choose_num_splits(wide_shape, H200, wide_config, q_len, num_reqs, 4096)
    unmerged = select.adapt_to_cache(attention, H200, config, True, True, adjacent_heads=False)
    assert (
        unmerged == sm90.unmerged_config(attention, config)
        and unmerged.kv_heads_per_tile == 1
        and unmerged.block_n == config.block_n
    )
    if dtypes is E4M3 and head_dim == 64:
        # A head of 64 e4m3 values is 32 elements of 16 bits, and upcasting in registers needs at least 64 of those. So
        # producer warps upcast (2d).
        assert described(unmerged) == "64x64 4w 4s 1p 1m 2d"
    else:
        assert unmerged == wide_config
    assert select.fallback_config(attention, config).kv_heads_per_tile == 1
    limits = Limits(num_reqs, 4095)
    geometry = Geometry.create(attention, limits, DraftShape(), H200, (Mode.DECODE,))
    assert split_kv.partial_rows(attention, unmerged, num_splits, 1) <= sizing.split_sizes(geometry, 1, num_reqs)[1]


@pytest.mark.parametrize(
    ("head_dim", "rows", "num_reqs", "expected"),
    [
        *((64, rows, 64, "128x64 8w 6s 1p 2m 2h") for rows in (9, 16)),
        (64, 16, 32, "128x64 8w 6s 1p 2m 2h"),
        (64, 16, 63, "128x64 8w 6s 1p 2m 2h"),
        (64, 16, 128, "128x64 8w 6s 1p 2m 2h"),
        *((64, 16, num_reqs, "64x128 4w 3s 2p 1m") for num_reqs in (1, 8, 31, 34, 40, 62, 100)),
        (64, 17, 64, "128x128 8w 6s 1p 2m"),
        (96, 16, 64, "128x64 8w 3s 1p 2m 2h"),
        (120, 16, 64, "128x64 8w 2s 1p 2m 2h gather"),
        (48, 16, 64, "128x64 8w 6s 1p 2m 2h gather"),
        *((head_dim, 16, 64, "64x64 4w 5s 2p 1m gather") for head_dim in (72, 80)),
        (88, 16, 64, "64x64 4w 4s 2p 1m gather"),
        (40, 16, 64, "64x128 4w 3s 2p 1m gather"),
        (64, 8, 64, "64x64 4w 3s 2p 1m 2h"),
    ],
)
def test_two_kv_heads_merge_when_requests_fill_ctas(head_dim, rows, num_reqs, expected):
    """Two KV heads with 65 to 128 rows in total merge if unsplit requests fill the SMs and padding is small."""
    attention = AttentionShape(32, 8, head_dim, 64)
    config = select.select_config(attention, H200, rows, num_reqs=num_reqs)
    assert described(config) == expected
    num_splits = split_kv.choose_num_splits(attention, H200, config, rows, num_reqs, 4096)
    geometry = Geometry.create(attention, Limits(num_reqs, 4000), DraftShape(4, 4, rows), H200, (Mode.VERIFY,))
    most, partials = sizing.split_sizes(geometry, rows, num_reqs)
    assert num_splits <= most
    for one in (config, sm90.unmerged_config(attention, config)):
        assert split_kv.partial_rows(attention, one, num_splits, rows) <= partials


def test_merge_heads_doubles_the_head_dim():
    """Heads that are adjacent within a token can be viewed as one, at any stride of tokens and pages."""
    kv = torch.arange(2 * 3 * 4 * 6 * 8).view(2, 3, 4, 6, 8)  # each page holds K and V
    k, v = kv[:, 1], kv[:, 2]
    assert has_adjacent_heads(k, v) and not has_adjacent_heads(k, v.transpose(1, 2).contiguous().transpose(1, 2))
    merged = tma.merge_heads(k, 2)
    assert merged.shape == (2, 4, 3, 16) and merged.data_ptr() == k.data_ptr()
    assert torch.equal(merged[1, 2, 1], torch.cat([k[1, 2, 2], k[1, 2, 3]]))
    assert tma.merge_heads(k, 1) is k
