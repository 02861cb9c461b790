"""On a GPU: random decode and verify batches with the selected configurations, eager and in graphs, against float64."""

from __future__ import annotations

import os
import random

import pytest
import torch

from plugins.cuda_triton.tests import helpers

pytestmark = pytest.mark.device

SHAPES = [
    # fields: heads, head_dim, page size, q_len, tail_len, tree, window, cap, dtype, kv_dtype
    ((8, 2), 128, 64, 1, 1, False, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 64, 8, 16, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 64, 16, 16, True, -1, 0.0, torch.float16, None),
    ((8, 2), 128, 128, 40, 40, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 16, 8, 8, True, 100, 0.0, torch.bfloat16, None),
    ((4, 4), 64, 64, 1, 1, False, 40, 0.0, torch.bfloat16, None),
    ((4, 4), 64, 64, 70, 70, True, -1, 0.0, torch.bfloat16, None),
    ((8, 1), 256, 64, 4, 8, True, -1, 30.0, torch.bfloat16, None),
    ((6, 2), 80, 32, 5, 5, False, -1, 0.0, torch.float16, None),
    ((4, 2), 96, 1, 3, 9, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 64, 8, 8, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((4, 2), 64, 16, 6, 6, True, -1, 0.0, torch.float32, None),
    ((14, 2), 128, 16, 16, 16, True, -1, 0.0, torch.bfloat16, None),
    ((10, 2), 128, 32, 16, 16, True, -1, 0.0, torch.bfloat16, None),
    ((12, 2), 128, 16, 1, 1, False, -1, 0.0, torch.bfloat16, None),
    ((12, 1), 128, 24, 16, 16, True, 50, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 16, 100, 100, True, -1, 0.0, torch.bfloat16, None),
    ((6, 2), 192, 16, 9, 18, True, -1, 20.0, torch.float16, None),
    ((4, 2), 256, 32, 40, 40, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 16, 1, 1, False, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((8, 2), 128, 64, 24, 24, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((4, 2), 64, 32, 8, 8, True, 70, 0.0, torch.float16, torch.float8_e4m3fn),
    ((4, 2), 256, 16, 20, 20, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((6, 1), 96, 64, 12, 12, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((8, 2), 128, 16, 16, 16, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((8, 2), 128, 64, 4, 12, True, 100, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((8, 2), 128, 32, 5, 5, False, 40, 30.0, torch.float16, torch.float8_e4m3fn),
    ((4, 2), 256, 64, 1, 1, False, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((6, 2), 192, 16, 9, 18, True, 70, 20.0, torch.float16, torch.float8_e4m3fn),
    ((8, 1), 80, 8, 1, 1, False, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((8, 2), 128, 1, 1, 1, False, -1, 0.0, torch.bfloat16, None),
    ((14, 2), 128, 1, 16, 16, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 1, 64, 64, True, -1, 0.0, torch.float16, None),
    ((8, 2), 128, 2, 8, 16, True, -1, 30.0, torch.bfloat16, None),
    ((8, 2), 128, 3, 16, 16, True, 100, 0.0, torch.bfloat16, None),
    ((8, 2), 64, 20, 40, 40, True, -1, 0.0, torch.bfloat16, None),
    ((4, 2), 256, 5, 40, 40, True, -1, 0.0, torch.bfloat16, None),
    ((6, 3), 72, 12, 1, 1, False, 60, 0.0, torch.float16, None),
    ((64, 8), 64, 16, 1, 1, False, -1, 0.0, torch.bfloat16, None),
    ((16, 4), 64, 64, 8, 16, True, -1, 0.0, torch.bfloat16, None),
    ((14, 2), 64, 32, 3, 3, True, 90, 30.0, torch.float16, None),
    ((8, 8), 48, 16, 5, 5, False, -1, 0.0, torch.bfloat16, None),
    ((12, 6), 40, 8, 16, 16, True, -1, 0.0, torch.float16, None),
    ((8, 8), 96, 16, 4, 4, True, -1, 0.0, torch.bfloat16, None),
    ((16, 4), 80, 64, 8, 16, True, 100, 0.0, torch.bfloat16, None),
    ((8, 4), 104, 16, 3, 3, True, -1, 30.0, torch.float16, None),
    ((8, 2), 120, 32, 1, 1, False, -1, 0.0, torch.bfloat16, None),
    ((4, 4), 112, 8, 70, 70, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 160, 64, 16, 16, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 120, 16, 60, 60, True, -1, 0.0, torch.bfloat16, None),
    ((16, 4), 64, 1, 8, 16, True, -1, 0.0, torch.bfloat16, None),
    ((8, 4), 72, 5, 3, 3, True, 70, 0.0, torch.float16, None),
    ((64, 8), 64, 16, 1, 1, False, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((16, 4), 64, 64, 8, 16, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((12, 6), 48, 32, 5, 5, True, 90, 30.0, torch.float16, torch.float8_e4m3fn),
    ((8, 4), 80, 16, 5, 5, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((8, 8), 96, 64, 16, 16, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((16, 4), 96, 16, 16, 16, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 64, 64, 16, 16, True, -1, 30.0, torch.float16, None),
    ((16, 4), 120, 32, 12, 12, True, 80, 0.0, torch.bfloat16, None),
    ((4, 4), 48, 8, 60, 60, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 160, 16, 1, 1, False, 50, 0.0, torch.float16, None),
    ((8, 2), 160, 32, 64, 64, True, -1, 30.0, torch.bfloat16, None),
    ((6, 2), 192, 64, 40, 40, True, -1, 0.0, torch.bfloat16, None),
    ((14, 2), 96, 16, 16, 16, True, 70, 0.0, torch.bfloat16, None),
    ((10, 2), 80, 1, 40, 40, True, -1, 0.0, torch.bfloat16, None),
    ((6, 3), 136, 8, 12, 12, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 176, 5, 9, 18, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 160, 64, 40, 40, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((8, 2), 128, 16, 16, 16, True, -1, 0.0, torch.bfloat16, None),
    ((10, 2), 112, 8, 9, 18, True, 70, 30.0, torch.float16, None),
    # These shapes have trees deeper than the window, windows of several tiles, or logits about as large as the cap.
    ((8, 2), 128, 16, 40, 40, True, 3, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 1, 40, 40, True, 3, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 64, 6, 6, True, 2, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((16, 4), 128, 64, 64, 64, True, 300, 0.0, torch.bfloat16, None),
    ((64, 8), 64, 16, 16, 16, True, 127, 0.0, torch.float16, None),
    ((16, 8), 256, 16, 16, 16, True, 200, 1.0, torch.bfloat16, None),
    ((8, 2), 128, 64, 5, 5, False, 250, 0.8, torch.bfloat16, None),
    ((8, 2), 128, 64, 40, 40, True, 200, 0.7, torch.bfloat16, torch.float8_e4m3fn),
    ((8, 2), 128, 16, 9, 9, False, 200, 0.7, torch.bfloat16, torch.float8_e4m3fn),
    # These shapes have several row tiles that see different parts of the tail, three consumer warp groups, or more than
    # 256 rows.
    ((8, 2), 128, 16, 200, 200, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 64, 100, 100, False, -1, 0.0, torch.float16, None),
    ((8, 2), 128, 1, 100, 100, True, -1, 0.0, torch.bfloat16, None),
    ((8, 2), 256, 16, 70, 70, True, 90, 0.0, torch.bfloat16, None),
    ((8, 2), 128, 16, 100, 100, True, -1, 0.0, torch.bfloat16, torch.float8_e4m3fn),
    ((8, 1), 64, 16, 24, 24, True, -1, 0.0, torch.bfloat16, None),
    ((8, 1), 64, 64, 40, 40, False, 50, 0.0, torch.float16, None),
    ((4, 1), 80, 16, 70, 90, True, 60, 30.0, torch.bfloat16, None),
    ((8, 1), 64, 16, 300, 300, True, -1, 0.0, torch.bfloat16, None),
]
BATCHES_PER_SHAPE = int(os.environ.get("DRAFTMARK_BATCHES", "30"))  # 87 shapes x 30 > 2,000 batches
REQUESTS = (1, 40, 528)
"""Requests for which configurations are selected: few, some, and a multiple of the 132 SMs."""


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0][0]}-{s[0][1]}x{s[1]}-p{s[2]}-q{s[3]}")
def test_random_batches(shape):
    """Random batches match float64, with the configurations for slow and for fast memory.

    Lengths, pages, trees and values are new in each batch; some prefixes are empty.
    """
    from draftmark import AttentionShape
    from draftmark.devices import device_profile
    from draftmark_cuda_triton.heuristics import select, split_kv
    from draftmark_cuda_triton.launch import tma

    heads, dim, page, q_len, tail_len, tree, window, cap, dtype, kv_dtype = shape
    device = device_profile("cuda")
    names = [str(t).removeprefix("torch.") for t in (dtype, kv_dtype or dtype)]
    attention = AttentionShape(*heads, dim, page, *names)
    tiles = [
        select.adapt_to_cache(
            *(attention, device, select.select_config(attention, device, q_len, num_reqs=count), True, tma.has_gluon()),
            fast_memory=fast,
        )
        for fast in (False, True)
        for count in REQUESTS
    ]
    chance = random.Random(dim + q_len)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-3
    for seed in range(BATCHES_PER_SHAPE):
        lens = tuple(chance.choice((0, 1, 63, 64, 65, chance.randrange(700))) for _ in range(chance.randint(1, 4)))
        problem = helpers.make_problem(
            seed, lens, q_len, tail_len, heads=heads, dim=dim, page=page, tree=tree, window_left=window,
            cap=cap, dtype=dtype, kv_dtype=kv_dtype,
        )  # fmt: skip
        config = tiles[seed % len(tiles)]
        num_splits = split_kv.choose_num_splits(attention, device, config, q_len, len(lens), max(lens) + tail_len)
        num_splits = chance.choice((num_splits, split_kv.even_splits(num_splits, len(lens)), 1))
        result = helpers.run_decode_verify(problem, config, num_splits)
        assert helpers.error(result.out, problem.out) < tolerance, (seed, lens)
        assert (result.lse.cpu() - problem.lse).abs().max() < 1e-2, (seed, lens)
        assert result.slots.tolist() == problem.slots, (seed, lens)


@pytest.mark.parametrize("sinks", [-20.0, 2.0, 12.0])
@pytest.mark.parametrize(
    "shape",
    [((64, 8), 64, 1, 1, False, 127), ((64, 8), 64, 16, 16, True, -1), ((10, 2), 128, 70, 70, True, -1)],
    ids=["gpt-oss-decode", "gpt-oss-verify16", "group5-verify70"],
)
def test_sinks_count_once(shape, sinks):
    """Each sink counts once in the softmax, with the selected number of splits and with one split."""
    from draftmark import AttentionShape
    from draftmark.devices import device_profile
    from draftmark_cuda_triton.heuristics import select, split_kv
    from draftmark_cuda_triton.launch import tma

    heads, dim, q_len, tail_len, tree, window = shape
    device, attention = device_profile("cuda"), AttentionShape(*heads, dim, 64)
    config = select.adapt_to_cache(
        attention, device, select.select_config(attention, device, q_len), True, tma.has_gluon()
    )
    for seed, lens in enumerate([(2000,), (0, 63, 700), (5000, 1)]):
        problem = helpers.make_problem(
            seed, lens, q_len, tail_len, heads=heads, dim=dim, page=64, tree=tree, window_left=window,
            dtype=torch.bfloat16, sinks=sinks,
        )  # fmt: skip
        for num_splits in (
            split_kv.choose_num_splits(attention, device, config, q_len, len(lens), max(lens) + tail_len),
            1,
        ):
            result = helpers.run_decode_verify(problem, config, num_splits)
            assert helpers.error(result.out, problem.out) < 5e-3, (lens, num_splits)
            assert (result.lse.cpu() - problem.lse).abs().max() < 1e-2, (lens, num_splits)


@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("q_len", [1, 4, 16])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 30.0, 1e4])
def test_fp8_with_extreme_magnitudes(page, q_len, size):
    """e4m3 keys and rows that differ by 2**20 in magnitude match float64, at any position of the largest logit."""
    from draftmark_cuda_triton.heuristics import common

    p = helpers.make_problem(
        q_len, (700, 3, 0, 300), q_len, q_len, heads=(8, 2), dim=128, page=page, dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn,
    )  # fmt: skip
    p.q.mul_(size)
    p.q[::3].mul_(2.0**-20)
    for place in (5, 600):
        # This key has extreme logits in every row of the first request.
        p.k[int(p.page_table[0, place // page]), place % page] = (p.q[0, ::4].sign() * 8).to(p.k.dtype)
    k, v = p.k.cpu().double() * 0.5, p.v.cpu().double() * 2.0
    seen = _unpack(p.mask.cpu(), p.tail_len).view(4, q_len, p.tail_len)
    out, lse = helpers.oracle(
        p.q.cpu(), k, v, tuple(p.prefix_lens.tolist()), p.page_table.cpu(), seen, p.depth.cpu(), -1, 0.0
    )
    for height in (16, 32, 64):
        result = helpers.run_decode_verify(
            p, common.KernelConfig(height, 64, 4, 3, 2, num_consumer_wgs=1, fp8_swap_ab=True), 5
        )
        assert helpers.error(result.out, out) < 5e-3
        assert ((result.lse.cpu() - lse).abs() / (1 + lse.abs())).max() < 1e-5


@pytest.mark.parametrize("sinks", [-5.0, 0.0, 6.0])
@pytest.mark.parametrize("q_len", [1, 7])
def test_sinks_over_fp8(q_len, sinks):
    """A sink counts once for split and unsplit requests, and is not part of the lse."""
    from draftmark_cuda_triton.heuristics import common

    p = helpers.make_problem(
        3, (700, 0, 130), q_len, q_len, heads=(8, 2), dim=128, page=16, dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn, sinks=sinks,
    )  # fmt: skip
    for num_splits in (1, 6):
        result = helpers.run_decode_verify(
            p, common.KernelConfig(32, 64, 4, 3, 2, num_consumer_wgs=1, fp8_swap_ab=True), num_splits
        )
        assert helpers.error(result.out, p.out) < 5e-3
        assert (result.lse.cpu() - p.lse).abs().max() < 1e-4


def _unpack(mask, slots):
    """Unpack mask words into bool ``[rows, slots]``."""
    return (mask[:, torch.arange(slots) // 32] >> (torch.arange(slots) % 32)) & 1 != 0


@pytest.mark.parametrize("num_consumer_wgs", [0, 1])
def test_replay_reads_current_lengths(num_consumer_wgs):
    """Graph replay of two layers reads the batch's current tensors, with longer and shorter lengths."""
    from draftmark_cuda_triton.heuristics import common
    from draftmark_cuda_triton.launch import attention, metadata, operands

    config, num_splits = common.KernelConfig(16, 64, 4, 3, 2, True), 17
    if num_consumer_wgs:
        config = common.KernelConfig(64, 64, 4, 3, 2, num_consumer_wgs=1)
    problems = [
        helpers.make_problem(s, lens, 1, 1, heads=(8, 2), dim=128, page=64, tree=False, dtype=torch.bfloat16)
        for s, lens in enumerate([(700, 3), (0, 64), (650, 699)])
    ]
    shape = operands.AttentionParams(2, 4, 128, 64, 128**-0.5, pdl=True)
    extent = operands.BatchExtent(2, 1, 1, 2)
    pool = max(p.k.shape[0] for p in problems)
    width = max(p.page_table.shape[1] for p in problems)
    k, v = (helpers.poison(pool, 64, 2, 128, dtype=torch.bfloat16) for _ in range(2))
    q = torch.zeros_like(problems[0].q)
    prefix = torch.zeros(2, dtype=torch.int32, device="cuda")
    table = torch.zeros(2, width, dtype=torch.int32, device="cuda")
    work, slots = helpers.poison(2 * num_splits, 4, dtype=torch.int32), helpers.poison(2, dtype=torch.int64)
    parts, weights = (
        helpers.poison(2 * num_splits * 2 * config.block_m, 128),
        helpers.poison(2 * num_splits * 2 * config.block_m),
    )
    outs, queries = [torch.zeros_like(q) for _ in range(2)], torch.zeros_like(q)

    def fill(p):
        k[: p.k.shape[0]], v[: p.v.shape[0]] = p.k, p.v
        q.copy_(p.q)
        prefix.copy_(p.prefix_lens)
        table[:, : p.page_table.shape[1]] = p.page_table

    def step():
        metadata.write_metadata_decode_verify(shape, config, extent, num_splits, prefix, table, slots, work)
        for out in outs:
            queries.fill_(float("nan"))
            queries.copy_(q)
            for _ in range(2):
                partials = operands.PartialResults(work, parts, weights)
                given = operands.Operands(queries, k, v, None, None, None, out, None, prefix, None, table)
                attention.attend_decode_verify(shape, config, extent, num_splits, given, partials)

    fill(problems[0])
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for p in problems:
        fill(p)
        for one in (work, parts, weights, *outs):
            one.fill_(-7 if one is work else float("nan"))
        graph.replay()
        assert all(helpers.error(out, p.out) < 5e-3 for out in outs)


@pytest.mark.parametrize("num_consumer_wgs", [0, 1])
def test_pdl_grids_wait_for_previous_stores(num_consumer_wgs):
    """Overlapping grids (PDL) in a graph read the schedule, rows and KV that the launch right before them wrote."""
    from draftmark_cuda_triton.heuristics import common
    from draftmark_cuda_triton.launch import attention, metadata, operands

    config, num_splits = (
        common.KernelConfig(64, 64, 4, 3, 2, num_consumer_wgs=1)
        if num_consumer_wgs
        else common.KernelConfig(16, 64, 4, 3, 2),
        17,
    )
    problem = helpers.make_problem(3, (700, 64), 1, 1, heads=(8, 2), dim=128, page=64, tree=False, dtype=torch.bfloat16)
    shape, extent = operands.AttentionParams(2, 4, 128, 64, 128**-0.5, pdl=True), operands.BatchExtent(2, 1, 1, 2)
    work, slots = helpers.poison(2 * num_splits, 4, dtype=torch.int32), helpers.poison(2, dtype=torch.int64)
    parts, weights = (
        helpers.poison(2 * num_splits * 2 * config.block_m, 128),
        helpers.poison(2 * num_splits * 2 * config.block_m),
    )
    outs = helpers.poison(64, *problem.q.shape, dtype=torch.bfloat16)
    q, k, v = (torch.full_like(one, float("nan")) for one in (problem.q, problem.k, problem.v))
    prefix, table = problem.prefix_lens, problem.page_table

    inputs = ((q, problem.q), (k, problem.k), (v, problem.v))

    def schedule():
        metadata.write_metadata_decode_verify(shape, config, extent, num_splits, prefix, table, slots, work)

    def step():
        for number, out in enumerate(outs):
            into, source = inputs[number % 3]
            into.fill_(float("nan"))
            work.fill_(-7)
            order = (schedule, lambda into=into, source=source: into.copy_(source))
            for launched in order if number % 2 else order[::-1]:
                launched()
            partials = operands.PartialResults(work, parts, weights)
            given = operands.Operands(q, k, v, None, None, None, out, None, prefix, None, table)
            attention.attend_decode_verify(shape, config, extent, num_splits, given, partials)

    for into, source in inputs:
        into.copy_(source)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        outs.fill_(float("nan"))
        graph.replay()
        assert all(helpers.error(out, problem.out) < 5e-3 for out in outs)


@pytest.mark.parametrize(("tail", "window_left"), [("tree", -1), ("causal", -1), ("causal", 50), ("block", -1)])
@pytest.mark.parametrize(
    ("page", "dim", "kv_dtype"),
    [
        *((page, 128, torch.bfloat16) for page in (1, 12, 16, 64)),
        *((page, 64, torch.bfloat16) for page in (16, 64)),
        *((page, 128, torch.float8_e4m3fn) for page in (16, 64)),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
def test_sm90_matches_interpreted_kernels(page, dim, tail, window_left, kv_dtype):
    """The outputs of `kernels_sm90` for a ragged batch match those of the interpreted kernels on the CPU."""
    from draftmark_cuda_triton.heuristics import common
    from draftmark_cuda_triton.launch import attention, metadata, operands

    heads, lens, block = (14, 2), (0, 40, 7, 300, 64, 5), tail == "block"

    def batch(longest):
        """Return the tensors, maximum rows and padded total rows of a batch with at most `longest` rows a request."""
        generator = torch.Generator().manual_seed(page)
        rows = [min(n, longest) for n in ((9,) * len(lens) if block else (5, 1, 0, 33, 1, 12))]
        max_rows, total = max(rows), sum(rows)
        padded_rows = total if block else total + 7
        width = -(-(max(lens) + max_rows) // page)
        table = (torch.randperm(len(lens) * width, generator=generator).view(len(lens), width) + 1).int()
        k, v = torch.randn(2, 1 + len(lens) * width, page, heads[1], dim, generator=generator).to(kv_dtype)
        q = torch.randn(padded_rows, heads[0], dim, generator=generator).bfloat16()
        nodes = [j for n in rows for j in range(n)] + [0] * (padded_rows - total)
        # A row's mask has two words. No row sees a slot after its own. Only row 32 sees a slot of the second word, its
        # own.
        mask = torch.tensor([[(1 << (j % 31 + 1)) - 1, j >= 32] for j in nodes]).int()
        depth = torch.arange(padded_rows, dtype=torch.int32) % 7
        starts = torch.tensor([0, *rows]).cumsum(0).int()
        return [q, k, v, torch.tensor(lens).int(), starts, table, mask, depth], max_rows, padded_rows

    def run(device, config, longest):
        tensors, max_rows, padded_rows = batch(longest)
        q, k, v, prefix, indptr, pages, mask, depth = (x.to(device) for x in tensors)
        shape = operands.AttentionParams(heads[1], 7, dim, page, dim**-0.5, 0.0, window_left, pdl=device == "cuda")
        extent = operands.BatchExtent(len(lens), max_rows, max_rows, padded_rows, not block)
        work = torch.full((10, 4), -7, dtype=torch.int32, device=device)
        slots, out = torch.zeros(padded_rows, dtype=torch.int64, device=device), torch.full_like(q, float("nan"))
        tiles = common.row_tiles(config, max_rows, 7 * config.kv_heads_per_tile) * heads[1] // config.kv_heads_per_tile
        parts = 2 * 5 * tiles * config.block_m
        metadata.write_metadata_decode_verify(shape, config, extent, 5, prefix, pages, slots, work, indptr)
        trees = (mask, depth) if tail == "tree" else (None, None)
        partials = operands.PartialResults(
            work,
            torch.full((parts, dim), float("nan"), device=device),
            torch.full((parts,), float("nan"), device=device),
        )
        given = operands.Operands(q, k, v, None, None, None, out, None, prefix, indptr, pages, *trees)
        attention.attend_decode_verify(shape, config, extent, 5, given, partials, block)
        return out.float().cpu()

    tiles = [
        common.KernelConfig(64 * m, n, 4, stages, 1, num_consumer_wgs=m, gather_kv=page % 8 > 0)
        for m, n, stages in ((1, 64, 3), (2, 128, 3), (2, 64, 6))
    ]
    if dim == 64:
        tiles = [
            common.KernelConfig(64, n, 4, 3, 2, num_consumer_wgs=1, kv_heads_per_tile=heads_per_tile)
            for n, heads_per_tile in ((128, 1), (64, 2), (128, 2))
        ]
        tiles.append(common.KernelConfig(128, 128, 8, 3, 1, num_consumer_wgs=2, kv_heads_per_tile=2))
    if kv_dtype is torch.float8_e4m3fn:
        tiles = [common.KernelConfig(m, 64, 4, 3, 2, num_consumer_wgs=1, fp8_swap_ab=True) for m in (16, 32, 64)]
        tiles.append(common.KernelConfig(128, 64, 8, 3, 1, num_consumer_wgs=2, num_fp8_stages=4))
    expected = {}
    for config in tiles:
        # With e4m3 upcast in registers, all rows of a request must fit into one row tile.
        longest = config.block_m // 7 if config.fp8_swap_ab else 33
        if longest not in expected:
            expected[longest] = run("cpu", common.KernelConfig(64, 64, 4, 2, 1), longest).double()
        assert helpers.error(run("cuda", config, longest), expected[longest]) < 5e-3
