"""On a GPU: random decode and verify batches with the selected configurations, eager and in graphs, against float64."""

from __future__ import annotations

import os
import random

import pytest
import torch

from plugins.cuda_triton.tests import helpers
from plugins.cuda_triton.tests.device_shapes import SHAPES

pytestmark = pytest.mark.device

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
        result = helpers.run_decode_verify(p, common.KernelConfig(height, 64, 4, 3, 2, common.Kernel.SM90_FP8, 1), 5)
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
            p, common.KernelConfig(32, 64, 4, 3, 2, common.Kernel.SM90_FP8, 1), num_splits
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

    config, num_splits = common.KernelConfig(16, 64, 4, 3, 2, common.Kernel.BOXES), 17
    if num_consumer_wgs:
        config = common.KernelConfig(64, 64, 4, 3, 2, common.Kernel.SM90, 1)
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
        common.KernelConfig(64, 64, 4, 3, 2, common.Kernel.SM90, 1)
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
