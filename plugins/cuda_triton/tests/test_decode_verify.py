"""Uniform decode and verify batches: prefix, masked tail and combine against float64."""

from __future__ import annotations

import random
from types import FunctionType, SimpleNamespace

import pytest
import torch

from plugins.cuda_triton.tests import helpers

LENS = (0, 1, 33, 100)


def config(block_m=16, block_n=32, use_tma=False):
    from draftmark_cuda_triton.heuristics.common import Kernel, KernelConfig

    return KernelConfig(block_m, block_n, 4, 2, 2, Kernel.BOXES if use_tma else Kernel.POINTERS)


@pytest.mark.parametrize("num_splits", [1, 2, 5, 40])
@pytest.mark.parametrize(("q_len", "tail_len", "tree"), [(1, 1, False), (3, 9, True), (5, 5, False), (7, 7, True)])
def test_every_mode_and_num_splits(q_len, tail_len, tree, num_splits):
    """out, lse and slots of decode, draft, chain and tree batches are right for any number of splits."""
    problem = helpers.make_problem(num_splits, LENS, q_len, tail_len, tree=tree)
    result = helpers.run_decode_verify(problem, config(), num_splits)
    assert helpers.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5
    assert result.slots.tolist() == problem.slots


@pytest.mark.parametrize("window_left", [-1, 40])
@pytest.mark.parametrize("lens", [(100,), (0, 33), (95, 1, 64)])
def test_splits_of_one_tile(lens, window_left):
    """With more splits than key tiles, each split holds one tile or only OVERHEAD_TILES, and results are right."""
    problem = helpers.make_problem(len(lens), lens, 2, 2, window_left=window_left)
    result = helpers.run_decode_verify(problem, config(), 40)
    assert set(result.work[:40, 2].tolist()) == {0, 1}
    assert helpers.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


@pytest.mark.parametrize("page", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("dim", [64, 80, 96])
def test_pages_and_head_dims(page, dim):
    """Any page size and head_dim, also no power of two, gives right results with NaN in unused slots."""
    problem = helpers.make_problem(page + dim, (0, 70), 3, 4, dim=dim, page=page)
    assert helpers.error(helpers.run_decode_verify(problem, config(), 4).out, problem.out) < 1e-5


@pytest.mark.parametrize("dim", [128, 256])
def test_large_head_dims(dim):
    """head_dim 128 and 256 give right results."""
    problem = helpers.make_problem(dim, (9, 40), 2, 2, dim=dim)
    assert helpers.error(helpers.run_decode_verify(problem, config(16, 16), 3).out, problem.out) < 1e-5


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 2)])
def test_groups(heads):
    """MHA, MQA and a group that is no power of two give right results over several row tiles."""
    problem = helpers.make_problem(heads[0], (50, 3), 9, 9, heads=heads)
    assert helpers.error(helpers.run_decode_verify(problem, config(), 5).out, problem.out) < 1e-5


@pytest.mark.parametrize("tail_len", [31, 32, 33, 64, 97, 200])
def test_long_tails(tail_len):
    """Tails (new tokens) of one mask word, of several words, and longer than a KV tile give right results."""
    problem = helpers.make_problem(tail_len, (0, 5, 45), 2, tail_len)
    assert helpers.error(helpers.run_decode_verify(problem, config(), 4).out, problem.out) < 1e-5


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3, 40])
@pytest.mark.parametrize(("q_len", "tail_len"), [(70, 70), (40, 90)])
def test_row_tiles_of_a_long_tail_for_any_num_splits(q_len, tail_len, num_splits, tree):
    """Rows see no slot after their own, and a split that lies entirely after a row tile's last row adds nothing."""
    problem = helpers.make_problem(num_splits, (0, 45, 64), q_len, tail_len, tree=tree)
    result = helpers.run_decode_verify(problem, config(), num_splits)
    assert helpers.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


@pytest.mark.parametrize("tree", [False, True])
def test_row_tile_skips_keys_after_its_rows(tree):
    """A row tile skips KV tiles after its last row: with 64 + 64 tokens, rows 0 to 31 read tiles 0 to 2."""
    problem = helpers.make_problem(1, (64,), 64, 64, tree=tree, page=32)
    problem.v[int(problem.page_table[0, 3])] = float("nan")
    out = helpers.run_decode_verify(problem, config(), 1).out.cpu()
    assert helpers.error(out[:32], problem.out[:32]) < 1e-5
    assert out[32:].isnan().all()


@pytest.mark.parametrize("is_hopper", [False, True])
def test_last_kv_tile_is_the_last_visible_one(is_hopper):
    """kv_tile_stop equals a count of visible keys, for row tiles and splits of any size."""
    from draftmark_cuda_triton.kernels import split_kv
    from draftmark_cuda_triton.launch import tma

    if is_hopper and not tma.has_gluon():
        pytest.skip("this Triton has no Gluon as `kernels_sm90` uses it")
    if is_hopper:
        from draftmark_cuda_triton.kernels_sm90 import split_kv
    own = split_kv.kv_tile_stop
    code = getattr(own, "fn", own).__code__
    language = SimpleNamespace(minimum=min, maximum=max)
    kv_tile_stop = FunctionType(code, {"gl": language, "tl": language, "BLOCK": 2})
    chance = random.Random(1)
    for _ in range(2000):
        keys, rows, prefix = chance.choice((32, 64, 128)), chance.randrange(1, 90), chance.randrange(300)
        tail, last = rows + chance.choice((0, chance.randrange(90))), chance.randrange(120)
        end = -(-(prefix + tail) // keys)
        tile, left = chance.randrange(end), chance.randrange(1, 2 * end + 1)
        for is_block in (False, True):
            how = SimpleNamespace(TAIL_KIND=2 if is_block else chance.randrange(2), BLOCK_N=keys)
            stop = kv_tile_stop(tile, left, end, prefix, tail, rows, last, *((how,) if is_hopper else (keys, is_block)))
            seen = prefix + tail if is_block else prefix + tail - rows + min(last, rows - 1) + 1
            tiles = {key // keys for key in range(seen)} & set(range(tile, tile + left))
            assert set(range(tile, stop)) == (tiles or {tile})


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("window_left", [0, 1, 40])
def test_window_is_measured_in_positions(window_left, tree):
    """A window counts positions (L + depth in a tree), not KV slots; tiles outside every row's window are skipped."""
    problem = helpers.make_problem(3, LENS, 6, 6, tree=tree, window_left=window_left)
    result = helpers.run_decode_verify(problem, config(), 5)
    assert helpers.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


def test_soft_cap():
    """The soft cap, cap · tanh(logit / cap), applies to out and lse."""
    problem = helpers.make_problem(4, LENS, 3, 3, cap=2.0)
    result = helpers.run_decode_verify(problem, config(), 5)
    assert helpers.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """bf16 and fp16 results stay within rounding."""
    problem = helpers.make_problem(5, LENS, 4, 4, dtype=dtype)
    assert helpers.error(helpers.run_decode_verify(problem, config(), 5).out, problem.out) < 4e-3


def test_fp8_cache():
    """An e4m3 cache with scales gives right results."""
    problem = helpers.make_problem(6, LENS, 4, 4, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert helpers.error(helpers.run_decode_verify(problem, config(), 5).out, problem.out) < 4e-3


@pytest.mark.parametrize(("q_len", "tail_len"), [(1, 1), (8, 16), (16, 16)])
def test_tma_tiles(q_len, tail_len):
    """KV tiles loaded by TMA give right results although the page holds NaN after the last token."""
    problem = helpers.make_problem(7, (0, 63, 64, 130), q_len, tail_len, page=64, tree=q_len > 1, dtype=torch.float16)
    result = helpers.run_decode_verify(problem, config(64 if q_len > 1 else 16, 64, use_tma=True), 6)
    assert helpers.error(result.out, problem.out) < 4e-3


def test_two_runs_are_bitwise_equal():
    """Two runs are bitwise equal; a race or a read of stale data would make them differ."""
    problem = helpers.make_problem(8, LENS, 3, 9)
    first, second = (helpers.run_decode_verify(problem, config(), 7).out for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("sinks", [-30.0, 1.0, 8.0])
@pytest.mark.parametrize("num_splits", [1, 5, 40])
def test_sinks_count_once(num_splits, sinks):
    """Each sink counts once in a row's softmax for any number of splits, and is not part of the lse."""
    problem = helpers.make_problem(num_splits, LENS, 3, 9, heads=(8, 2), window_left=40, cap=9.0, sinks=sinks)
    result = helpers.run_decode_verify(problem, config(), num_splits)
    assert helpers.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


@pytest.mark.parametrize(("sink", "share"), [(float("-inf"), 1.0), (-1e4, 1.0), (1e4, 0.0)])
def test_extreme_sinks(sink, share):
    """A sink of -inf or -1e4 leaves the rows unchanged; a sink of 1e4 reduces them to 0."""
    problem = helpers.make_problem(2, LENS, 3, 3)
    expected = problem.out * share
    problem.sinks = torch.full((4,), sink, device=helpers.DEVICE)
    for num_splits in (1, 7):
        assert (helpers.run_decode_verify(problem, config(), num_splits).out.cpu() - expected).abs().max() < 1e-5
