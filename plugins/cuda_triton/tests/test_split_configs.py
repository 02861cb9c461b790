"""Configurations and splits of EXTEND batches by their lengths, and the number of splits of other batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmark import AttentionShape
from draftmark_cuda_triton.heuristics import common, select, sm90, split_kv
from draftmark_cuda_triton.heuristics.common import KernelConfig
from plugins.cuda_triton.tests.shapes import BF16, E4M3, FP32, H200, shape


def fastest_config(attention, configs, q_lens, lens):
    """Return the one of `configs` that an EXTEND batch takes if its row tiles stay whole."""
    return split_kv.fastest_tiles([split_kv.ExtendTiles(attention, H200, one) for one in configs], q_lens, lens).config


@pytest.mark.parametrize(
    ("heads", "rows", "lens", "num_groups"),
    [
        ((24, 8), 512, (32768,), 3), ((24, 8), 2048, (0,) * 8, 3), ((24, 8), 256, (4096,) * 8, 3),
        ((40, 8), 512, (32768,), 2), ((40, 8), 256, (4096,) * 8, 2), ((32, 32), 4096, (0,) * 4, 2),
        ((32, 8), 512, (32768,), 2), ((24, 8), 40, (8192,) * 4, 2), ((24, 8), 512, None, 2),
    ],
)  # fmt: skip
def test_prefill_of_heads_of_96_takes_the_faster_number_of_warp_groups(heads, rows, lens, num_groups):
    """EXTEND over heads of 96 uses three consumer warp groups where they were measured to be faster than two."""
    attention, q_lens = AttentionShape(*heads, 96, 16), (rows,) * (1 if lens is None else len(lens))
    usual = select.select_config(attention, H200, 4096, prefill=True)
    planned = sm90.prefill_configs(attention, usual)
    found = fastest_config(attention, planned, q_lens, lens)
    assert usual.num_consumer_wgs == 2 and found.num_consumer_wgs == num_groups
    assert found in planned


@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 48])
@pytest.mark.parametrize("dtypes", [BF16, E4M3, FP32])
@pytest.mark.parametrize("head_dim", [32, 64, 72, 80, 88, 96, 120, 128, 256])
def test_every_extend_batch_has_one_of_the_planned_configurations(head_dim, dtypes, page_size):
    """EXTEND chooses among `prefill_configs`, for which kernels are planned; the first of them is the usual one."""
    attention = shape(head_dim, dtypes, page_size)
    usual = select.select_config(attention, H200, 4096, prefill=True)
    planned = sm90.prefill_configs(attention, usual)
    assert planned[0] == usual
    for rows, lens in (((5, 1, 17), (0, 2, 1)), ((512,), (32768,)), ((256,) * 8, (4096,) * 8), ((512,), None)):
        assert fastest_config(attention, planned, rows, lens) in planned


@pytest.mark.parametrize("head_dim", [64, 80, 104, 128])
def test_other_heads_have_one_number_of_warp_groups(head_dim):
    """EXTEND over heads without 81 to 96 columns has one configuration, whatever the lengths."""
    attention = shape(head_dim, BF16, 16)
    usual = select.select_config(attention, H200, 4096, prefill=True)
    assert sm90.prefill_configs(attention, usual) == (usual,)
    assert fastest_config(attention, (usual,), (512,), (32768,)) is usual


@pytest.mark.parametrize(
    ("heads", "rows", "lens", "block_m"),
    [
        ((32, 8), 28, (8192,) * 8, 64), ((32, 8), 28, (8192,) * 5, 128), ((32, 8), 28, None, 64),
        ((32, 8), 16, (8192,) * 5, 64), ((32, 8), 29, (8192,) * 8, 128),
        ((28, 4), 16, (4096,) * 3, 64), ((28, 4), 16, (4400, 100, 8700), 128), ((28, 4), 16, (4096,) * 11, 128),
        ((28, 4), 16, (4096,) * 12, 64),
    ],
)  # fmt: skip
def test_few_chunks_load_many_keys_once(heads, rows, lens, block_m):
    """Few chunks of 65 to 112 rows keep one CTA an SM if the host's length bounds are large and there is no window."""
    attention, count = AttentionShape(*heads, 128, 16), 5 if lens is None else len(lens)
    unsplit = select.select_config(attention, H200, 4096, prefill=True)
    found = split_kv.ExtendTiles(attention, H200, unsplit).split((rows,) * count, lens).config
    assert (found.block_m, found.ctas_per_sm) == (block_m, 2 if block_m == 64 else 1)
    windowed = replace(attention, window_left=100)
    found = split_kv.ExtendTiles(windowed, H200, unsplit).split((rows,) * count, lens).config
    assert found.block_m == (64 if rows < 29 else 128)


@pytest.mark.parametrize(
    ("heads", "head_dim", "rows", "lens", "expected"),
    [
        ((16, 4), 256, 512, (0,), False), ((16, 4), 256, 1064, (0,), False), ((16, 8), 256, 2240, (0,), False),
        ((8, 2), 256, 2069, (0,), False), ((4, 2), 256, 2415, (0,) * 3, False), ((8, 1), 256, 543, (0,), False),
        ((16, 8), 192, 1453, (0,), False), ((8, 4), 192, 1810, (0,) * 2, False), ((4, 2), 192, 2355, (0,) * 3, False),
        ((16, 4), 256, 256, (8192,), True), ((16, 4), 256, 804, (7139,) * 4, True), ((8, 1), 256, 1482, (0,), True),
        ((8, 2), 192, 519, (293,), True), ((8, 2), 192, 945, (0,), True), ((16, 4), 256, 64, (8192,) * 8, True),
    ],
)  # fmt: skip
def test_large_heads_split_only_where_measured_faster(heads, head_dim, rows, lens, expected):
    """Batches with large heads are split only where splitting was measured to be faster.

    Partial results of many columns take long to store and combine. So prompts of little more than one row tile a CTA
    stay unsplit, while few row tiles after long prefixes are split.
    """
    attention, q_lens = AttentionShape(*heads, head_dim, 16), (rows,) * len(lens)
    config = select.select_config(attention, H200, 4096, prefill=True)
    tiles = split_kv.ExtendTiles(attention, H200, config).split(q_lens, lens)
    assert tiles.splitting_pays(q_lens, lens) == expected


def test_row_tiles_splits_and_partials():
    """Row tiles, splits and partial rows equal values computed by hand, for 32/8 heads of 128 on 132 SMs."""
    attention, config = AttentionShape(32, 8, 128, 16), KernelConfig(64, 64, 4, 3, 2)
    assert [common.row_tiles(config, q_len, 4) for q_len in (1, 16, 17, 64)] == [1, 1, 2, 4]
    # Two CTAs on each of 132 SMs are 264 CTAs. A split has one CTA for each of 8 KV heads: 264 / 8 = 33 splits.

    assert split_kv.choose_num_splits(attention, H200, config, 1, 64, 4096) == 33
    # 17 rows are two row tiles, so a split has 16 CTAs.
    assert split_kv.choose_num_splits(attention, H200, config, 17, 64, 4096) == 16

    # 4096 keys are 64 tiles, so 33 splits of one request are possible. 512 keys are 8 tiles, plus two OVERHEAD_TILES.
    assert split_kv.choose_num_splits(attention, H200, config, 1, 1, 4096) == 33
    assert split_kv.choose_num_splits(attention, H200, config, 1, 1, 512) == 10
    assert split_kv.choose_num_splits(attention, H200, config, 1, 1, 448) == 9
    assert split_kv.choose_num_splits(attention, H200, config, 1, 2, 512) == 20
    assert split_kv.choose_num_splits(attention, H200, replace(config, block_m=16), 1, 1, 512) == 10
    assert split_kv.choose_num_splits(attention, H200, config, 10000, 1, 64) == 1
    # In each split at most two requests are cut, each with a row tile of 64 packed rows for each of 8 KV heads.
    assert split_kv.partial_rows(attention, config, 33, 1) == 2 * 33 * 8 * 64
    assert split_kv.partial_rows(attention, config, 16, 17) == 2 * 16 * 8 * 2 * 64
    assert split_kv.partial_rows(attention, config, 1, 17) == 0
    assert common.max_row_tiles(replace(config, block_n=32), 4, 100, 7) == 6 + 7


@pytest.mark.parametrize(
    ("num_splits", "num_reqs", "expected"),
    [
        (20, 19, 19),
        (20, 18, 20),
        (20, 21, 20),
        (20, 57, 19),
        (20, 58, 20),
        (19, 36, 19),
        (40, 76, 38),
        (39, 74, 39),
        (5, 5, 5),
    ],
)
def test_even_splits_drops_at_most_a_twentieth(num_splits, num_reqs, expected):
    """`even_splits` drops at most a twentieth of the splits, and only if requests of equal length then stay whole."""
    assert split_kv.even_splits(num_splits, num_reqs) == expected


@pytest.mark.parametrize(("num_reqs", "kv_heads"), [(32, 8), (64, 8), (251, 1)])
def test_two_ctas_per_sm_keep_requests_whole(num_reqs, kv_heads):
    """Batches of many requests that use two CTAs an SM have no more splits than requests."""
    attention = AttentionShape(4 * kv_heads, kv_heads, 128, 64)
    config = select.select_config(attention, H200, 16, num_reqs=num_reqs)
    most = split_kv.choose_num_splits(attention, H200, config, 16, num_reqs, 4096)
    assert config.ctas_per_sm == 2 and split_kv.even_splits(most, num_reqs) <= num_reqs


@pytest.mark.parametrize("head_dim", [40, 64, 72, 80, 88, 128, 256])
def test_prefill_needs_no_more_row_tiles_than_other_batches(head_dim):
    """Three consumer warp groups of EXTEND need no more row tiles than two."""
    few, config = (select.select_config(shape(head_dim), H200, 4096, prefill=extend) for extend in (False, True))
    assert common.max_row_tiles(config, 1, 4096, 3) <= common.max_row_tiles(few, 1, 4096, 3)
