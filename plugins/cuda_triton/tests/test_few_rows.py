"""Batches whose rows the device decides, and whole draft blocks, against float64."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode, load
from draftmark.runtime import Causal, ForwardBatch, KVCache, Unknown

HEADS, DIM, WORDS = (4, 2), 64, 3
LENS, ROWS = (0, 40, 7, 130, 64, 5), (5, 1, 0, 33, 1, 12)
"""Fresh prompts, decodes beside trees, a request without rows, masks of two words."""


def tail(rows, kind, chance):
    """Who sees whom, bool ``[n, n]``, and depths, of one request's rows."""
    seen, depth = torch.eye(rows, dtype=torch.bool), torch.arange(rows, dtype=torch.int32)
    for slot in range(1, rows):
        parent = chance.randrange(slot) if kind == "tree" else slot - 1
        seen[slot] |= seen[parent]
        depth[slot] = depth[parent] + 1
    return (torch.ones(rows, rows, dtype=torch.bool) if kind == "block" else seen), depth


def pack(seen):
    """bool ``[n, n]`` → int32 ``[n, WORDS]``."""
    bits = torch.zeros(len(seen), WORDS * 32, dtype=torch.int64)
    bits[:, : len(seen)] = seen
    packed = (bits.view(len(seen), WORDS, 32) << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def strided(pool, kind):
    """The same contents as a view: K and V halves of one page, or interleaved by token."""
    if kind == "contiguous":
        return pool
    pages, page, heads, dim = pool.shape
    shape = (pages, 2, page, heads, dim) if kind == "halves" else (pages, page, 2, heads, dim)
    home = torch.full(shape, float("nan"), dtype=pool.dtype, device=pool.device)
    view = home[:, 1] if kind == "halves" else home[:, :, 1]
    view.copy_(pool)
    return view


def run(
    bench, kind, pieces, *, lens=LENS, rows=ROWS, budget=None, window_left=-1, cap=0.0, layout="contiguous", page=16
):
    """Both launches of a batch of few rows over poisoned buffers; the worst error, and what was stored where."""
    from draftmark_cuda_triton import launch, tiling

    chance, generator = random.Random(pieces), torch.Generator().manual_seed(sum(rows))
    most, total, ragged = max(1, *rows), sum(rows), kind != "block"
    budget = budget or total + (5 if ragged else 0)
    width = -(-(max(lens) + most) // page)
    table = (torch.randperm(len(lens) * width, generator=generator).view(len(lens), width) + 1).int()
    k, v = (torch.full((1 + len(lens) * width, page, HEADS[1], DIM), float("nan")) for _ in range(2))
    q = torch.randn(budget, HEADS[0], DIM, generator=generator)
    mask, depths = torch.full((budget, WORDS), -7, dtype=torch.int32), torch.full((budget,), -7, dtype=torch.int32)
    slots, outs = bench.filled((k, v), table, lens, rows, generator), []
    for r, (n, t) in enumerate(zip(lens, rows, strict=True)):
        first = sum(rows[:r])
        if t:
            seen, depth = tail(t, kind, chance)
            mask[first : first + t], depths[first : first + t] = pack(seen), depth
            here = (q[first : first + t], k.double(), v.double(), (n,), table[r : r + 1])
            outs.append(bench.oracle(*here, seen[None], depth[None], window_left, cap)[0])
    prefix = torch.tensor(lens, dtype=torch.int32)
    indptr = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
    q, k, v, table, mask, depths, prefix, indptr = (
        x.to(bench.device) for x in (q, k, v, table, mask, depths, prefix, indptr)
    )
    k, v = strided(k, layout), strided(v, layout)
    shape = launch.Attention(HEADS[1], HEADS[0] // HEADS[1], DIM, page, DIM**-0.5, cap, window_left)
    tile, extent = tiling.Tile(16, 32, 4, 2, 2), launch.Extent(len(lens), most, most, budget, ragged)
    work, mapping = bench.poison(2 * pieces, 4, dtype=torch.int32), bench.poison(budget, dtype=torch.int64)
    parts = 2 * pieces * HEADS[1] * tiling.row_tiles(tile, most, shape.group) * tile.block_m
    out = bench.poison(budget, HEADS[0], DIM)
    launch.write_metadata(shape, tile, extent, pieces, prefix, table, mapping, work, indptr)
    tree = (mask, depths if ragged else depths.view(len(lens), most)) if kind == "tree" else (None, None)
    launch.attend(
        shape, tile, extent, pieces, q, k, v, None, None, prefix, table, *tree, work, bench.poison(parts, DIM),
        bench.poison(parts), out, None, indptr, kind == "block",
    )  # fmt: skip
    assert mapping.tolist() == slots + [-1] * (budget - total)
    assert not out[total:].any(), "rows that belong to nobody are zero"
    return bench.error(out[:total], torch.cat(outs)) if outs else 0.0


@pytest.mark.parametrize("pieces", [1, 2, 7, 40])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_rows_that_the_device_decides(bench, kind, pieces):
    """Trees, chains, decodes and a request without rows in one launch, however the schedule cuts the batch."""
    assert run(bench, kind, pieces) < 1e-5


@pytest.mark.parametrize("window_left", [0, 3, 50])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_window(bench, kind, window_left):
    """A window cuts by position, in a ragged batch too."""
    assert run(bench, kind, 5, window_left=window_left) < 1e-5


def test_soft_cap_and_odd_pages(bench):
    """cap · tanh(logit / cap), and pages of 5."""
    assert run(bench, "tree", 5, cap=2.0, page=5) < 1e-5


def test_a_batch_without_any_row(bench):
    """All requests wait: nothing is stored, every row of the budget is zero, and nothing hangs."""
    assert run(bench, "chain", 4, rows=(0,) * len(LENS), budget=3) == 0


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("window_left", [-1, 4])
def test_blocks_see_each_other(bench, pieces, window_left):
    """Every row of a draft block sees the later ones too, under a window as well."""
    assert run(bench, "block", pieces, rows=(9,) * len(LENS), window_left=window_left) < 1e-5


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_strided_pages(bench, layout):
    """KV as views of pages that hold K and V in halves, or side by side for each token."""
    assert run(bench, "tree", 5, layout=layout) < 1e-5


def test_rows_without_a_place_are_not_stored(bench):
    """Slot -1 stores nothing; the other rows go where the engine says."""
    from draftmark_cuda_triton.writing import write_kv

    k, v = (torch.randn(4, 2, DIM, device=bench.device) for _ in range(2))
    pools = [bench.poison(3, 8, 2, DIM) for _ in range(2)]
    slots = torch.tensor([9, -1, 23, -1], device=bench.device)
    write_kv(k, v, *pools, None, None, slots)
    for rows, pool in zip((k, v), pools, strict=True):
        flat = pool.view(24, 2, DIM)
        assert torch.equal(flat[[9, 23]], rows[[0, 2]])
        assert flat.isnan().flatten(1).all(1).sum() == 22


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND])
def test_a_window_is_left_out_where_all_of_a_page_table_fits_into_it(mode):
    """At a page table's last token: a window that is one narrower hides the first key, from both modes' kernels."""
    from draftmark_cuda_triton.launch import Attention

    page, last = 16, 63
    found = []
    for window_left in (last - 1, last, 10 * last, -1):
        shape = AttentionShape(2, 1, 16, page, "float32", "float32", window_left=window_left)
        device = DeviceProfile("cuda", 90, 132)
        geometry = Geometry.create(shape, Limits(1, last, 16), DraftShape(), device, (mode,))
        assert geometry.max_pages_per_req * page == last + 1
        assert Attention.of(geometry, True).window == (window_left == last - 1)
        v = torch.arange(5.0 * page * 16).view(5, page, 1, 16)
        q, out = torch.ones(1, 2, 16), torch.full((1, 2, 16), float("nan"))
        lens = [torch.tensor(one, dtype=torch.int32) for one in ([last], [0, 1])]
        table, positions = torch.arange(1, 5, dtype=torch.int32)[None], torch.tensor([last])
        batch = ForwardBatch(mode, 0, *lens, table, Causal(), positions, Unknown(1, last), 1, (1,), (1,), 1, None)
        backend = load("cuda_triton").open(geometry, "cpu")
        backend.plan(batch)
        backend.write_metadata(batch)
        backend.attend(q, KVCache(torch.zeros_like(v), v), batch, out)
        tokens = v[1:].reshape(-1, 16)
        torch.testing.assert_close(out, tokens[window_left == last - 1 :].mean(0).expand_as(out))
        found.append(out)
    assert not torch.equal(found[0], found[1]) and torch.equal(found[1], found[3])
