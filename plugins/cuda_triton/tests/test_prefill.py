"""Ragged causal batches against float64."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import AttentionShape
from draftmark.devices import device_profile
from plugins.cuda_triton.tests import helpers


def run(
    lens, rows, *, page=16, dim=64, window_left=-1, cap=0.0, dtype=torch.float32, block_m=16, sinks=None,
    kv_dtype=None, scales=(None, None), attention=None, l2_keys=1 << 30, num_splits=1, programs=0,
):  # fmt: skip
    """Run write_metadata_prefill and attend_prefill of a random ragged batch, and check slots and header.

    Args:
        attention: shape for which the configuration is selected; None uses a small fixed configuration.
        l2_keys: keys of one head that fit into L2.
        num_splits: splits of a KV head's row tiles; 1 to never split.
        programs: number of resident CTAs for the split estimate; 0 uses enough CTAs that row tiles are split.

    Returns:
        The larger of the errors of out and lse.
    """
    from draftmark_cuda_triton import prefill
    from draftmark_cuda_triton.heuristics import common, select, split_kv
    from draftmark_cuda_triton.launch import metadata, operands
    from draftmark_cuda_triton.launch.attention import attend_prefill

    config = common.KernelConfig(block_m, 32, 4, 2, 2)
    width = -(-max(n + t for n, t in zip(lens, rows, strict=True)) // page)
    generator = torch.Generator().manual_seed(sum(lens) + sum(rows))
    table = (torch.randperm(len(lens) * width, generator=generator).view(len(lens), width) + 1).int()
    pool = (1 + len(lens) * width, page, 2, dim)
    k, v = (torch.full(pool, float("nan"), dtype=torch.float32).to(kv_dtype or dtype) for _ in range(2))
    real = [1.0 if one is None else one for one in scales]
    q = torch.randn(sum(rows), 4, dim, generator=generator).to(dtype)
    slots = helpers.fill_cache((k, v), table, lens, rows, generator)
    exact = [cache.double() * factor for cache, factor in zip((k, v), real, strict=True)]
    expected_out, expected_lse = helpers.ragged_oracle(q, *exact, lens, rows, table, window_left, cap, sinks)
    prefix = torch.tensor(lens, dtype=torch.int32, device=helpers.DEVICE)
    indptr = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(helpers.DEVICE)
    q, k, v, table = (x.to(helpers.DEVICE) for x in (q, k, v, table))
    if attention is not None:
        chosen = select.select_config(attention, device_profile("cuda"), 4096, prefill=True)
        if num_splits > 1:
            split_tiles = split_kv.ExtendTiles(attention, device_profile("cuda"), chosen).split(rows, lens)
            chosen = chosen if split_tiles is None else split_tiles.config
        where = prefill.has_uniform_row_stride(k, v), prefill.has_tma_boxes(k, v)
        config = select.adapt_to_cache(attention, device_profile("cuda"), chosen, *where)
    sinks = sinks if sinks is None else sinks.to(helpers.DEVICE)
    factors = (one if one is None else torch.tensor([one], device=helpers.DEVICE) for one in scales)
    shape = operands.AttentionParams(2, 2, dim, page, dim**-0.5, cap, window_left, l2_keys=l2_keys)
    tiles = helpers.poison(
        common.SCHEDULE_HEADER_ROWS + common.max_row_tiles(config, 2, len(q), len(lens)), 2, dtype=torch.int32
    )
    mapping, out = helpers.poison(len(q), dtype=torch.int64), helpers.poison(*q.shape, dtype=dtype)
    split, schedule = None, ()
    if num_splits > 1:
        work, cells = helpers.poison(2 * num_splits, 4, dtype=torch.int32), 2 * num_splits * 2 * config.block_m
        partials = operands.PartialResults(work, helpers.poison(cells, dim), helpers.poison(cells))
        split = operands.SplitBuffers(num_splits, programs or 2 * num_splits, partials)
        schedule = None, work, num_splits, split.num_ctas
    metadata.write_metadata_prefill(shape, config, len(q), prefix, indptr, table, mapping, tiles, *schedule)
    lse = helpers.poison(*q.shape[:2])
    given = operands.Operands(q, k, v, *factors, sinks, out, lse, prefix, indptr, table)
    attend_prefill(shape, config, len(q), given, tiles, split)
    assert mapping.tolist() == slots
    # After attention the header is ready for the next layer: 0 tiles taken, row tiles, concurrent heads,
    # tiles_per_request.
    number = sum(-(-t * 2 // config.block_m) for t in rows)
    longest = max(n + t for n, t in zip(lens, rows, strict=True) if t)
    tiles_per_request = int(tiles[1, 1])
    assert tiles[: common.SCHEDULE_HEADER_ROWS].tolist() == [
        [0, number],
        [1 if l2_keys < 2 * longest else 2, tiles_per_request],
    ]
    assert tiles_per_request == 0 or (tiles_per_request == 1 and num_splits > 1)
    return max(helpers.error(out, expected_out), helpers.error(lse, expected_lse))


@pytest.mark.parametrize("block_m", [16, 48, 64])
def test_prefill_and_chunks(block_m):
    """Prompts, chunks after a prefix, single tokens and requests without rows are right in one batch.

    block_m need not be a power of two.
    """
    assert run((0, 40, 7, 0, 64), (37, 9, 1, 0, 20), block_m=block_m) < 1e-5


@pytest.mark.parametrize("num_splits", [2, 5, 40])
@pytest.mark.parametrize("block_m", [16, 48])
@pytest.mark.parametrize(("lens", "rows"), [
    ((300,), (1,)), ((0, 40, 7, 0, 264), (37, 9, 1, 0, 20)), ((0, 0), (64, 5)), ((700, 3, 0, 90), (5, 0, 70, 1)),
])  # fmt: skip
def test_split_row_tiles(lens, rows, block_m, num_splits):
    """Split row tiles give right results for long prefixes, prompts and single tokens, with any number of splits."""
    sinks = torch.tensor([1.5, float("-inf"), -2.0, 4.0])
    for options in ({"block_m": block_m}, {"sinks": sinks, "cap": 9.0, "window_left": 50, "block_m": block_m}):
        assert run(lens, rows, num_splits=num_splits, **options) < 1e-5


@pytest.mark.parametrize("window_left", [0, 5, 50])
def test_window(window_left):
    """Rows see window_left positions to their left."""
    assert run((0, 70), (40, 11), window_left=window_left) < 1e-5


@pytest.mark.parametrize("page", [1, 5, 128])
def test_pages(page):
    """Any page size gives right results."""
    assert run((3, 30), (20, 5), page=page, dim=80) < 1e-5


def test_half_precision():
    """bf16 results stay within rounding."""
    assert run((3, 30), (20, 5), dtype=torch.bfloat16) < 4e-3


@pytest.mark.parametrize("window_left", [-1, 5])
def test_sinks(window_left):
    """Each head's sink takes its share of every row's softmax, also with a window smaller than the prefix."""
    sinks = torch.tensor([1.5, float("-inf"), -2.0, 4.0])
    assert run((0, 70, 3), (40, 11, 0), window_left=window_left, sinks=sinks) < 1e-5


def test_soft_cap():
    """The soft cap is cap · tanh(logit / cap)."""
    assert run((0, 30), (20, 5), cap=0.5) < 1e-5


@pytest.mark.parametrize("scales", [(None, None), (0.5, None), (None, 2.0), (0.5, 2.0)])
def test_fp8_k_and_v_scales(scales):
    """A missing scale is 1; K's scale changes the lse, and V's scale only out."""
    assert run((3, 30), (20, 5), kv_dtype=torch.float8_e4m3fn, scales=scales) < 1e-5


@pytest.mark.parametrize("num_splits", [1, 5])
def test_launch_without_row_tiles_writes_nothing(num_splits):
    """A launch without row tiles writes nothing, so `Prefill.warm_up` can compile kernels with it."""
    from draftmark_cuda_triton.heuristics import common
    from draftmark_cuda_triton.launch import attention, operands

    config, shape = common.KernelConfig(16, 32, 4, 2, 2), operands.AttentionParams(2, 2, 64, 16, 0.125)
    nothing = torch.zeros(2 * num_splits * 4, dtype=torch.int32, device=helpers.DEVICE)
    lens, table = torch.ones(3, dtype=torch.int32), torch.ones(3, 4, dtype=torch.int32)
    q, k = torch.ones(9, 4, 64, device=helpers.DEVICE), torch.ones(2, 16, 2, 64, device=helpers.DEVICE)
    indptr = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    out, partial = helpers.poison(9, 4, 64), helpers.poison(2 * num_splits * 2 * 16, 64)
    partials = operands.PartialResults(nothing, partial, partial[:, 0])
    split = operands.SplitBuffers(num_splits, 10, partials) if num_splits > 1 else None
    steps = (one.to(helpers.DEVICE) for one in (lens, indptr, table))
    given = operands.Operands(q, k, k, None, None, None, out, None, *steps)
    attention.attend_prefill(shape, config, 9, given, nothing, split)
    assert out.isnan().all() and partial.isnan().all() and not nothing.any()


E4M3 = torch.float8_e4m3fn


@pytest.mark.device
@pytest.mark.parametrize(
    ("dim", "page", "dtype", "kv_dtype", "window_left", "cap"),
    [
        *(
            (dim, page, torch.bfloat16, None, -1, 0.0)
            for dim in (64, 80, 96, 128, 160, 192, 256)
            for page in (1, 16, 64)
        ),
        *((dim, 16, torch.float16, None, 100, 30.0) for dim in (64, 72, 128, 144, 256)),
        *((dim, 16, torch.bfloat16, E4M3, -1, 0.0) for dim in (64, 80, 128, 192, 256)),
        *((dim, 24, torch.float16, E4M3, 70, 0.0) for dim in (40, 128, 256)),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_selected_configs(dim, page, dtype, kv_dtype, window_left, cap):
    """On a GPU, selected configurations are right for full, partial and empty row tiles, with one or many KV tiles."""
    names = [str(one).removeprefix("torch.") for one in (dtype, kv_dtype or dtype)]
    attention = AttentionShape(4, 2, dim, page, *names)
    chance = random.Random(dim + page)
    for _ in range(4):
        lens = tuple(chance.choice((0, 1, 63, 64, 127, 128, chance.randrange(1500))) for _ in range(5))
        rows = tuple(chance.choice((0, 1, 31, 32, 33, 64, 96, chance.randrange(700))) for _ in range(5))
        rows = rows if any(rows) else (1,) * 5
        options = {
            "page": page,
            "dim": dim,
            "window_left": window_left,
            "cap": cap,
            "dtype": dtype,
            "kv_dtype": kv_dtype,
        }
        assert run(lens, rows, attention=attention, **options) < 5e-3, (lens, rows)
        num_splits, few = chance.choice((2, 5, 33)), tuple(min(n, 30) for n in rows)
        for some in (rows, few):
            assert run(lens, some, attention=attention, num_splits=num_splits, **options) < 5e-3, (
                lens,
                some,
                num_splits,
            )


@pytest.mark.device
@pytest.mark.parametrize("l2_keys", [1 << 30, 1000, 1])
@pytest.mark.parametrize(("dim", "page"), [(64, 16), (128, 1), (256, 64)])
def test_each_row_tile_is_processed_once(dim, page, l2_keys):
    """On a GPU, each row tile is processed once, with fewer or more tiles than CTAs and several concurrent heads."""
    attention = AttentionShape(4, 2, dim, page)
    options = {"page": page, "dim": dim, "dtype": torch.bfloat16, "attention": attention, "l2_keys": l2_keys}
    for lens, rows in (((0,), (1,)), ((0, 700, 0), (40, 0, 9)), ((0,) * 12, (700,) * 12)):
        assert run(lens, rows, **options) < 5e-3, (lens, rows)
