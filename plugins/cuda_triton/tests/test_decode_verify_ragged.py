"""Ragged batches (row counts are read on the device) and bidirectional draft blocks, compared with float64."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode, load
from draftmark.runtime import Causal, ForwardBatch, KVCache, Unknown
from plugins.cuda_triton.tests import helpers

HEADS, DIM, WORDS = (4, 2), 64, 3
LENS, ROWS = (0, 40, 7, 130, 64, 5), (5, 1, 0, 33, 1, 12)
"""Empty prefixes, decode rows next to trees, a request without rows, and masks of two words."""


def tail(rows, kind, chance):
    """Return the visibility (bool ``[n, n]``) and depths of one request's rows."""
    seen, depth = torch.eye(rows, dtype=torch.bool), torch.arange(rows, dtype=torch.int32)
    for slot in range(1, rows):
        parent = chance.randrange(slot) if kind == "tree" else slot - 1
        seen[slot] |= seen[parent]
        depth[slot] = depth[parent] + 1
    return (torch.ones(rows, rows, dtype=torch.bool) if kind == "block" else seen), depth


def pack(seen):
    """Pack bool ``[n, n]`` into int32 ``[n, WORDS]``."""
    bits = torch.zeros(len(seen), WORDS * 32, dtype=torch.int64)
    bits[:, : len(seen)] = seen
    packed = (bits.view(len(seen), WORDS, 32) << torch.arange(32)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).int()


def strided(pool, kind):
    """Return a non-contiguous view of equal contents: a half of each page, or one of two tensors of each token."""
    if kind == "contiguous":
        return pool
    pages, page, heads, dim = pool.shape
    shape = (pages, 2, page, heads, dim) if kind == "halves" else (pages, page, 2, heads, dim)
    home = torch.full(shape, float("nan"), dtype=pool.dtype, device=pool.device)
    view = home[:, 1] if kind == "halves" else home[:, :, 1]
    view.copy_(pool)
    return view


def run(
    kind,
    num_splits,
    *,
    lens=LENS,
    rows=ROWS,
    budget=None,
    window_left=-1,
    cap=0.0,
    layout="contiguous",
    page=16,
):
    """Run metadata and attention over poisoned buffers, check the slots, and return the error of out."""
    from draftmark_cuda_triton.heuristics import common
    from draftmark_cuda_triton.launch import attention, metadata, operands

    chance, generator = random.Random(num_splits), torch.Generator().manual_seed(sum(rows))
    most, total, ragged = max(1, *rows), sum(rows), kind != "block"
    budget = budget or total + (5 if ragged else 0)
    width = -(-(max(lens) + most) // page)
    table = (torch.randperm(len(lens) * width, generator=generator).view(len(lens), width) + 1).int()
    k, v = (torch.full((1 + len(lens) * width, page, HEADS[1], DIM), float("nan")) for _ in range(2))
    q = torch.randn(budget, HEADS[0], DIM, generator=generator)
    mask, depths = torch.full((budget, WORDS), -7, dtype=torch.int32), torch.full((budget,), -7, dtype=torch.int32)
    slots, outs = helpers.fill_cache((k, v), table, lens, rows, generator), []
    for r, (n, t) in enumerate(zip(lens, rows, strict=True)):
        first = sum(rows[:r])
        if t:
            seen, depth = tail(t, kind, chance)
            mask[first : first + t], depths[first : first + t] = pack(seen), depth
            here = (q[first : first + t], k.double(), v.double(), (n,), table[r : r + 1])
            outs.append(helpers.oracle(*here, seen[None], depth[None], window_left, cap)[0])
    prefix = torch.tensor(lens, dtype=torch.int32)
    indptr = torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
    q, k, v, table, mask, depths, prefix, indptr = (
        x.to(helpers.DEVICE) for x in (q, k, v, table, mask, depths, prefix, indptr)
    )
    k, v = strided(k, layout), strided(v, layout)
    shape = operands.AttentionParams(HEADS[1], HEADS[0] // HEADS[1], DIM, page, DIM**-0.5, cap, window_left)
    config, extent = common.KernelConfig(16, 32, 4, 2, 2), operands.BatchExtent(len(lens), most, most, budget, ragged)
    work, mapping = helpers.poison(2 * num_splits, 4, dtype=torch.int32), helpers.poison(budget, dtype=torch.int64)
    parts = 2 * num_splits * HEADS[1] * common.row_tiles(config, most, shape.group) * config.block_m
    out = helpers.poison(budget, HEADS[0], DIM)
    metadata.write_metadata_decode_verify(shape, config, extent, num_splits, prefix, table, mapping, work, indptr)
    tree = (mask, depths if ragged else depths.view(len(lens), most)) if kind == "tree" else (None, None)
    given = operands.Operands(q, k, v, None, None, None, out, None, prefix, indptr, table, *tree)
    partials = operands.PartialResults(work, helpers.poison(parts, DIM), helpers.poison(parts))
    attention.attend_decode_verify(shape, config, extent, num_splits, given, partials, kind == "block")
    assert mapping.tolist() == slots + [-1] * (budget - total)
    assert not out[total:].any(), "padding rows are zero"
    return helpers.error(out[:total], torch.cat(outs)) if outs else 0.0


@pytest.mark.parametrize("num_splits", [1, 2, 7, 40])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_ragged_rows(kind, num_splits):
    """Trees, chains, decode rows and a request without rows are right in one launch, for any number of splits."""
    assert run(kind, num_splits) < 1e-5


@pytest.mark.parametrize("window_left", [0, 3, 50])
@pytest.mark.parametrize("kind", ["chain", "tree"])
def test_window(kind, window_left):
    """A window is measured in positions in a ragged batch too."""
    assert run(kind, 5, window_left=window_left) < 1e-5


def test_soft_cap_and_odd_pages():
    """A soft cap with pages of 5 tokens gives right results."""
    assert run("tree", 5, cap=2.0, page=5) < 1e-5


def test_batch_without_rows():
    """A batch without rows stores nothing, sets every padding row to zero, and ends."""
    assert run("chain", 4, rows=(0,) * len(LENS), budget=3) == 0


@pytest.mark.parametrize("num_splits", [1, 7])
@pytest.mark.parametrize("window_left", [-1, 4])
def test_block_rows_see_later_rows(num_splits, window_left):
    """Every row of a draft block sees later rows too, also under a window."""
    assert run("block", num_splits, rows=(9,) * len(LENS), window_left=window_left) < 1e-5


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_strided_pages(layout):
    """K and V that are halves of one page, or interleaved token by token, give right results."""
    assert run("tree", 5, layout=layout) < 1e-5


def test_slot_minus_one_stores_nothing():
    """Rows with slot -1 are not stored; other rows are stored in their slots."""
    from draftmark_cuda_triton.kv_write import write_kv

    k, v = (torch.randn(4, 2, DIM, device=helpers.DEVICE) for _ in range(2))
    pools = [helpers.poison(3, 8, 2, DIM) for _ in range(2)]
    slots = torch.tensor([9, -1, 23, -1], device=helpers.DEVICE)
    write_kv(k, v, *pools, None, None, slots)
    for rows, pool in zip((k, v), pools, strict=True):
        flat = pool.view(24, 2, DIM)
        assert torch.equal(flat[[9, 23]], rows[[0, 2]])
        assert flat.isnan().flatten(1).all(1).sum() == 22


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND])
def test_window_larger_than_page_table_is_ignored(mode):
    """A window that covers the page table has no effect; a window smaller by one hides the first key."""
    from draftmark_cuda_triton.launch.operands import AttentionParams

    page, last = 16, 63
    found = []
    for window_left in (last - 1, last, 10 * last, -1):
        shape = AttentionShape(2, 1, 16, page, "float32", "float32", window_left=window_left)
        device = DeviceProfile("cuda", 90, 132)
        geometry = Geometry.create(shape, Limits(1, last, 16), DraftShape(), device, (mode,))
        assert geometry.max_pages_per_req * page == last + 1
        assert AttentionParams.from_geometry(geometry, True).window == (window_left == last - 1)
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
