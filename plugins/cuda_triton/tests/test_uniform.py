"""Uniform batches: prefix, masked tail and merge against float64."""

from __future__ import annotations

import random
from types import FunctionType, SimpleNamespace

import pytest
import torch

LENS = (0, 1, 33, 100)


def tile(block_m=16, block_n=32, tma=False):
    from draftmark_cuda_triton.tiling import Tile

    return Tile(block_m, block_n, 4, 2, 2, tma)


@pytest.mark.parametrize("pieces", [1, 2, 5, 40])
@pytest.mark.parametrize(("q_len", "tail_len", "tree"), [(1, 1, False), (3, 9, True), (5, 5, False), (7, 7, True)])
def test_every_mode_and_cut(bench, run_uniform, q_len, tail_len, tree, pieces):
    """out, lse and slots of decode, draft, chain and tree are right however the schedule cuts the batch."""
    problem = bench.problem(pieces, LENS, q_len, tail_len, tree=tree)
    result = run_uniform(problem, tile(), pieces)
    assert bench.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5
    assert result.slots.tolist() == problem.slots


@pytest.mark.parametrize("window_left", [-1, 40])
@pytest.mark.parametrize("lens", [(100,), (0, 33), (95, 1, 64)])
def test_pieces_of_one_tile(bench, run_uniform, lens, window_left):
    """Short requests spread as far as they go: every piece is one tile, or the surplus behind a request's last."""
    problem = bench.problem(len(lens), lens, 2, 2, window_left=window_left)
    result = run_uniform(problem, tile(), 40)
    assert set(result.work[:40, 2].tolist()) == {0, 1}
    assert bench.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


@pytest.mark.parametrize("page", [1, 3, 16, 64, 128])
@pytest.mark.parametrize("dim", [64, 80, 96])
def test_pages_and_head_dims(bench, run_uniform, page, dim):
    """Any page size, and head_dim that is no power of two, beside NaN in unused slots."""
    problem = bench.problem(page + dim, (0, 70), 3, 4, dim=dim, page=page)
    assert bench.error(run_uniform(problem, tile(), 4).out, problem.out) < 1e-5


@pytest.mark.parametrize("dim", [128, 256])
def test_wide_heads(bench, run_uniform, dim):
    """head_dim 128 and 256."""
    problem = bench.problem(dim, (9, 40), 2, 2, dim=dim)
    assert bench.error(run_uniform(problem, tile(16, 16), 3).out, problem.out) < 1e-5


@pytest.mark.parametrize("heads", [(4, 4), (8, 1), (6, 2)])
def test_groups(bench, run_uniform, heads):
    """Multi-head, multi-query, and a group that is no power of two; rows spill over several row tiles."""
    problem = bench.problem(heads[0], (50, 3), 9, 9, heads=heads)
    assert bench.error(run_uniform(problem, tile(), 5).out, problem.out) < 1e-5


@pytest.mark.parametrize("tail_len", [31, 32, 33, 64, 97, 200])
def test_long_tails(bench, run_uniform, tail_len):
    """Mask words are aligned to tiles wherever L ends: tails of one word, of many, and beyond a tile."""
    problem = bench.problem(tail_len, (0, 5, 45), 2, tail_len)
    assert bench.error(run_uniform(problem, tile(), 4).out, problem.out) < 1e-5


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("pieces", [1, 3, 40])
@pytest.mark.parametrize(("q_len", "tail_len"), [(70, 70), (40, 90)])
def test_row_tiles_of_a_long_tail_however_it_is_cut(bench, run_uniform, q_len, tail_len, pieces, tree):
    """Rows see no slot behind their own: of a piece behind all of a row tile's rows nothing is counted."""
    problem = bench.problem(pieces, (0, 45, 64), q_len, tail_len, tree=tree)
    result = run_uniform(problem, tile(), pieces)
    assert bench.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


@pytest.mark.parametrize("tree", [False, True])
def test_a_row_tile_leaves_out_what_lies_behind_its_rows(bench, run_uniform, tree):
    """Of a prefix of 64 tokens and a tail of 64, rows of slots 0 to 31 are asked for tiles 0 to 2 of 32 keys."""
    problem = bench.problem(1, (64,), 64, 64, tree=tree, page=32)
    problem.v[int(problem.page_table[0, 3])] = float("nan")
    out = run_uniform(problem, tile(), 1).out.cpu()
    assert bench.error(out[:32], problem.out[:32]) < 1e-5
    assert out[32:].isnan().all()


@pytest.mark.parametrize("is_hopper", [False, True])
def test_the_last_tile_of_a_row_tile_is_the_last_that_a_row_sees(is_hopper):
    """By counting keys, of rows and pieces of any size; a piece that has no such tile has its first one."""
    from draftmark_cuda_triton import boxes
    from draftmark_cuda_triton.kernels import split

    if is_hopper and not boxes.available():
        pytest.skip("this Triton has no Gluon as `hopper` uses it")
    own = boxes.hopper().uniform.stop_of if is_hopper else split.stop_of
    code = getattr(own, "fn", own).__code__
    language = SimpleNamespace(minimum=min, maximum=max)
    stop_of = FunctionType(code, {"gl": language, "tl": language, "BLOCK": 2})
    chance = random.Random(1)
    for _ in range(2000):
        keys, rows, prefix = chance.choice((32, 64, 128)), chance.randrange(1, 90), chance.randrange(300)
        tail, last = rows + chance.choice((0, chance.randrange(90))), chance.randrange(120)
        end = -(-(prefix + tail) // keys)
        tile, left = chance.randrange(end), chance.randrange(1, 2 * end + 1)
        for is_block in (False, True):
            how = SimpleNamespace(TAIL=2 if is_block else chance.randrange(2), BLOCK_N=keys)
            stop = stop_of(tile, left, end, prefix, tail, rows, last, *((how,) if is_hopper else (keys, is_block)))
            seen = prefix + tail if is_block else prefix + tail - rows + min(last, rows - 1) + 1
            tiles = {key // keys for key in range(seen)} & set(range(tile, tile + left))
            assert set(range(tile, stop)) == (tiles or {tile})


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("window_left", [0, 1, 40])
def test_window_is_measured_in_positions(bench, run_uniform, window_left, tree):
    """A window cuts the prefix by depth, not by slot, and skips tiles that no row sees."""
    problem = bench.problem(3, LENS, 6, 6, tree=tree, window_left=window_left)
    result = run_uniform(problem, tile(), 5)
    assert bench.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


def test_soft_cap(bench, run_uniform):
    """cap · tanh(logit / cap), in the lse too."""
    problem = bench.problem(4, LENS, 3, 3, cap=2.0)
    result = run_uniform(problem, tile(), 5)
    assert bench.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(bench, run_uniform, dtype):
    """bf16 and fp16 stay within their rounding."""
    problem = bench.problem(5, LENS, 4, 4, dtype=dtype)
    assert bench.error(run_uniform(problem, tile(), 5).out, problem.out) < 4e-3


def test_fp8_cache(bench, run_uniform):
    """e4m3 KV with scales."""
    problem = bench.problem(6, LENS, 4, 4, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    assert bench.error(run_uniform(problem, tile(), 5).out, problem.out) < 4e-3


@pytest.mark.parametrize(("q_len", "tail_len"), [(1, 1), (8, 16), (16, 16)])
def test_boxes(bench, run_uniform, q_len, tail_len):
    """Tiles through the copy engine bear NaN behind the last token."""
    problem = bench.problem(7, (0, 63, 64, 130), q_len, tail_len, page=64, tree=q_len > 1, dtype=torch.float16)
    result = run_uniform(problem, tile(64 if q_len > 1 else 16, 64, tma=True), 6)
    assert bench.error(result.out, problem.out) < 4e-3


def test_same_twice(bench, run_uniform):
    """Bitwise the same in two runs: no race, no leftover."""
    problem = bench.problem(8, LENS, 3, 9)
    first, second = (run_uniform(problem, tile(), 7).out for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("sinks", [-30.0, 1.0, 8.0])
@pytest.mark.parametrize("pieces", [1, 5, 40])
def test_sinks_count_once(bench, run_uniform, pieces, sinks):
    """A head's sink weighs once in a row, however the schedule cuts the batch; the lse is that of the keys."""
    problem = bench.problem(pieces, LENS, 3, 9, heads=(8, 2), window_left=40, cap=9.0, sinks=sinks)
    result = run_uniform(problem, tile(), pieces)
    assert bench.error(result.out, problem.out) < 1e-5
    assert (result.lse.cpu() - problem.lse).abs().max() < 1e-5


@pytest.mark.parametrize(("sink", "share"), [(float("-inf"), 1.0), (-1e4, 1.0), (1e4, 0.0)])
def test_sinks_far_from_all_logits(bench, run_uniform, sink, share):
    """A sink of -inf, or far below, leaves the rows as they are; one far above takes all of their weight."""
    problem = bench.problem(2, LENS, 3, 3)
    expected = problem.out * share
    problem.sinks = torch.full((4,), sink, device=bench.device)
    for pieces in (1, 7):
        assert (run_uniform(problem, tile(), pieces).out.cpu() - expected).abs().max() < 1e-5
