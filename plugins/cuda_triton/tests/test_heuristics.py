"""Number of splits, gathered configurations, and configurations for the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmark import AttentionShape, DeviceProfile
from draftmark_cuda_triton.heuristics import common, interpreted, select, split_kv

CONFIG = common.KernelConfig(block_m=16, block_n=64, num_warps=4, num_stages=3, ctas_per_sm=2)
SPLITS, Q_LEN = 132, 6


def shape(page_size: int) -> AttentionShape:
    """Return the shape of 4/2 heads of 128."""
    return AttentionShape(4, 2, 128, page_size=page_size)


@pytest.mark.parametrize(("context", "num_splits"), [(1024, 19), (4096, 33), (131072, 33)])
def test_short_decode_has_one_split_per_tile(context, num_splits):
    """A decode of one request has one split per tile, counting OVERHEAD_TILES; at most 33 for 8 KV heads on 132 SMs."""
    device, attention = DeviceProfile("cuda", 90, 132), AttentionShape(32, 8, 128, 64)
    config = select.select_config(attention, device, 1)
    assert split_kv.choose_num_splits(attention, device, config, 1, 1, context + 1) == num_splits


@pytest.mark.parametrize("page_size", [1, 16, 48, 128])
def test_interpreted_requests_of_several_tiles_are_split(page_size):
    """If the longest possible request has two tiles or more, the interpreter uses two splits, for any page size."""
    config, num_splits = interpreted.interpreted_config(shape(page_size), CONFIG, Q_LEN, SPLITS, 700)
    assert (num_splits, config.block_n < 700) == (2, True)


@pytest.mark.parametrize(("page_size", "max_kv_len"), [(1, 90), (16, 255), (128, 120)])
def test_interpreted_requests_of_one_tile_are_not_split(page_size, max_kv_len):
    """If every request fits one tile, the interpreter uses one split."""
    config, num_splits = interpreted.interpreted_config(shape(page_size), CONFIG, Q_LEN, SPLITS, max_kv_len)
    assert (num_splits, config.block_n >= max_kv_len) == (1, True)


@pytest.mark.parametrize("page_size", [64, 128, 192, 1024])
def test_interpreted_tiles_fit_pages(page_size):
    """Interpreted decode uses the largest tile that divides a page; EXTEND keeps the block_n of the kernel."""
    few, _ = interpreted.interpreted_config(shape(page_size), CONFIG, Q_LEN, SPLITS, 700)
    ragged, _ = interpreted.interpreted_prefill_config(shape(page_size), CONFIG, 700, 1)
    assert page_size % few.block_n == 0
    assert few.block_n == {64: 64, 128: 128, 192: 64, 1024: 256}[page_size]
    assert ragged.block_n == CONFIG.block_n


@pytest.mark.parametrize(
    "heads", [(32, 8), (28, 4), (40, 8), (48, 8), (64, 8), (96, 8), (24, 8), (32, 16), (40, 1), (71, 1)]
)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_splits_fill_the_device(heads, dim):
    """Splits fill one wave of CTAs, or two or three waves if one leaves more than a tenth of the CTAs idle."""
    attention = AttentionShape(*heads, dim, 16, q_dtype="bfloat16", kv_dtype="bfloat16")
    device = DeviceProfile(kind="cuda", arch=90, num_sms=132)
    for nodes in (1, 8, 16, 60, 64, 96, 128, 192, 256):
        config = select.select_config(attention, device, nodes, num_reqs=16)
        rows = common.row_tiles(config, nodes, attention.group_size * config.kv_heads_per_tile)
        ctas_per_split, num_ctas = rows * heads[1] // config.kv_heads_per_tile, 132 * config.ctas_per_sm
        num_splits = split_kv.choose_num_splits(attention, device, config, nodes, 16, 131072)
        full = [n for n in (1, 2, 3) if 10 * (n * num_ctas // ctas_per_split) * ctas_per_split >= 9 * n * num_ctas]
        few = split_kv.choose_num_splits(attention, device, config, nodes, 3, 131072)
        assert few == max(1, num_ctas // ctas_per_split)
        assert num_splits == max(1, (full or [1])[0] * num_ctas // ctas_per_split)
        assert (
            split_kv.partial_rows(attention, config, num_splits, nodes)
            <= 2 * 3 * max(num_ctas, ctas_per_split) * config.block_m
        )


@pytest.mark.parametrize("num_splits", [1, 2, 132])
@pytest.mark.parametrize("max_kv_len", [40, 255, 2600])
@pytest.mark.parametrize("q_len", [1, 9, 70])
def test_interpreted_partials_fit_the_allocated_rows(num_splits, max_kv_len, q_len):
    """The interpreter's configuration needs no more partial rows than were allocated for the GPU's configuration."""
    config, few = interpreted.interpreted_config(shape(16), CONFIG, q_len, num_splits, max_kv_len)
    allocated = split_kv.partial_rows(shape(16), CONFIG, num_splits, q_len)
    assert split_kv.partial_rows(shape(16), config, few, q_len) <= allocated
    assert few <= num_splits


@pytest.mark.parametrize("page_size", [1, 2, 3, 4, 5, 12, 20, 100])
@pytest.mark.parametrize("q_len", [1, 16, 64])
def test_gathered_config_equals_tma_config(page_size, q_len):
    """Configurations with gathered keys equal those with TMA, except the kernel, so schedules and buffers are equal."""
    device = DeviceProfile("cuda", 90, 132)
    tma_config, gathered = (
        select.select_config(AttentionShape(32, 8, 128, page), device, q_len, num_reqs=20) for page in (64, page_size)
    )
    assert (tma_config.kernel, gathered.kernel) == (common.Kernel.SM90, common.Kernel.SM90_GATHER)
    assert replace(gathered, kernel=common.Kernel.SM90) == tma_config


def test_gather_needs_sm90_and_kv_dtype_of_q():
    """Without sm_90, or without KV in q's 16-bit dtype, the Triton kernels serve pages that TMA cannot load."""
    hopper = DeviceProfile("cuda", 90, 132)
    for device, names in (
        (hopper, ("bfloat16", "float8_e4m3fn")),
        (hopper, ("float32", "float32")),
        (DeviceProfile("cuda", 80, 108), ("bfloat16", "bfloat16")),
        (DeviceProfile("cuda", 100, 148), ("bfloat16", "bfloat16")),
    ):
        config = select.select_config(AttentionShape(32, 8, 128, 1, *names), device, 1)
        assert (config.num_consumer_wgs, config.kernel) == (0, common.Kernel.POINTERS)


def test_unaligned_cache_is_not_gathered():
    """A cache without 16-byte alignment runs in the Triton kernels, since cp.async and TMA both need alignment."""
    device, attention = DeviceProfile("cuda", 90, 132), AttentionShape(32, 8, 128, 1)
    config = select.adapt_to_cache(attention, device, select.select_config(attention, device, 1), True, False)
    assert (config.num_consumer_wgs, config.kernel) == (0, common.Kernel.POINTERS)


@pytest.mark.parametrize(
    ("dim", "window", "keys"),
    [(64, -1, 128), (64, 127, 64), (64, 1022, 64), (64, 4095, 128), (128, 127, 64), (128, 511, 128), (256, 4095, 64)],
)
def test_short_windows_use_smaller_tiles(dim, window, keys):
    """Short windows use smaller key tiles for prefill and trees, and sizing includes these configurations."""
    device, attention = DeviceProfile("cuda", 90, 132), AttentionShape(64, 8, dim, 64, window_left=window)
    tiles = [select.select_config(attention, device, 4096, prefill=True), select.select_config(attention, device, 64)]
    assert [config.block_n for config in tiles] == [keys, keys]
    assert set(tiles) <= {*select.config_candidates(attention, device), *select.prefill_candidates(attention, device)}
