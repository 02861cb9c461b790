"""Fixtures: geometries, batches, the keys that each row sees, and a second implementation of FA2's partition."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from draftmark import TARGET_MODES, AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark.batch import BatchBuffers
from draftmark.lengths import Exact

H200 = DeviceProfile("cuda", 90, 132)


@pytest.fixture
def make_geometry():
    """Return a function that makes a geometry on an H200; keyword arguments replace fields of its parts."""

    def make(**fields):
        parts = {
            "attention": AttentionShape(8, 2, 128, 64),
            "draft": DraftShape(3, 4, 7),
            "limits": Limits(6, 1000, 256, (1, 4, 8)),
            "device": H200,
        }
        for name, part in parts.items():
            mine = {key: value for key, value in fields.items() if hasattr(part, key)}
            parts[name] = replace(part, **mine)
        modes = fields.get("modes", TARGET_MODES)
        return Geometry.create(parts["attention"], parts["limits"], parts["draft"], parts["device"], modes)

    return make


@pytest.fixture
def make_batch():
    """Return a function that makes a batch on scattered pages, with a random tree if the mode permits trees."""

    def make(geometry, mode, lens, *, padded=None, step=0, tree=True, seed=0, device="cpu"):
        extent, dice = geometry.extent(mode, step), random.Random(seed)
        count, live = padded or len(lens), len(lens)
        buffers = BatchBuffers(geometry, device)
        batch = buffers.uniform(mode, step, count, live, Exact(tuple(lens)), tree=tree and mode is not Mode.DECODE)
        batch.prefix_lens.zero_()
        batch.prefix_lens[:live] = torch.tensor(lens, dtype=torch.int32)
        width, ids = geometry.max_pages_per_req, list(range(1, 1 + live * geometry.max_pages_per_req))
        dice.shuffle(ids)
        batch.page_table.zero_()
        batch.page_table[:live] = torch.tensor(ids, dtype=torch.int32).view(live, width)
        if batch.tail.__class__.__name__ == "Tree":
            seen, depth = _trees(count, extent, dice)
            words = torch.zeros(count * extent.q_len, geometry.mask_words, dtype=torch.int64)
            for slot in range(extent.tail_len):
                words[:, slot // 32] |= seen[:, slot].long() << (slot % 32)
            batch.tail.mask.copy_(words.to(torch.int32))
            batch.tail.depth.copy_(depth)
        return batch

    return make


@pytest.fixture(scope="session")
def truth():
    """Return a function of (geometry, batch, request). It computes each row's visible KV slots from mask and window."""
    return _truth


def _truth(geometry, batch, r):
    """Return for each row the KV slots of prefix tokens in its window, and of draft tokens that its mask permits."""
    a, q_len, tail_len = geometry.attention, batch.q_lens[0], batch.tail_lens[0]
    prefix = int(batch.prefix_lens[r])
    table = batch.page_table[r].tolist()

    def slot(position):
        return table[position // a.page_size] * a.page_size + position % a.page_size

    rows = []
    for row in range(q_len):
        own = tail_len - q_len + row
        words = batch.tail.mask[r * q_len + row].tolist() if hasattr(batch.tail, "mask") else None
        depth = batch.tail.depth[r].tolist() if words else list(range(tail_len))
        here, seen = prefix + depth[own], []
        for position in range(prefix):
            if a.window_left < 0 or here - position <= a.window_left:
                seen.append(slot(position))
        for j in range(tail_len):
            named = (words[j // 32] >> (j % 32)) & 1 if words else j <= own
            if named and (a.window_left < 0 or depth[own] - depth[j] <= a.window_left):
                seen.append(slot(prefix + j))
        rows.append(sorted(seen))
    return rows


@pytest.fixture(scope="session")
def library_plan():
    """Return a function that computes FA2's partition as FlashInfer does; it shares no code with the plugin.

    Reference: `PrefillSplitQOKVIndptr` and `PrefillPlanImpl`, `include/flashinfer/attention/scheduler.cuh`.
    """
    return _plan


def _plan(q_lens, pages, *, heads, kv_heads, dim, page_size, sms, graph, q_len=0, window=-1, fixed=-1, shared=True):
    """Return (bytes of float workspace, bytes of int workspace, CTAs with work, CTAs of the grid) of one plan.

    `pages` has each request's number of KV pages. Before 0.7.1 (`shared` False) the heads of a group do
    not share partial rows, and a plan has flags of CTAs if it splits.
    """
    group, count = heads // kv_heads, len(q_lens)
    limit = 2 * sms // kv_heads
    packed = [n * group for n in q_lens]
    mean = q_len * group if graph else sum(packed) // count
    tile = (128 if dim < 256 else 64) if mean > 64 else 64 if mean > 16 else 16
    grid_tiles = count * -(-q_len * group // tile) if graph else sum(-(-p // tile) for p in packed)
    seen = [min(-(-(window + tile) // page_size), n) if window >= 0 else n for n in pages]
    split = False
    if fixed > 0:
        chunk = fixed
    else:
        low, high = max(128 // page_size, 1), max(1, *seen)
        longest = high
        while low < high:
            middle = (low + high) // 2
            if sum(-(-p // tile) * -(-max(n, 1) // middle) for p, n in zip(packed, seen, strict=True)) > limit:
                low = middle + 1
            else:
                high = middle
        split, chunk = graph or low < longest, low
    work = 0
    for p, n in zip(packed, seen, strict=True):
        chunks = -(-max(n, 1) // chunk)
        split = split or (fixed > 0 and chunks > 1)
        work += -(-p // tile) * chunks
    grid = max(limit, grid_tiles) if graph else work
    offset = 0
    for size in (4 * grid, 4 * grid, 4 * grid, 4 * (count + 1)):
        offset = -(-offset // 16) * 16 + size
    offset += 4
    if graph:
        offset = -(-offset // 16) * 16 + 4
    floats = 0
    if split:
        partials = -(-grid * tile // (group if shared else 1))
        assert sum(n * -(-max(m, 1) // chunk) for n, m in zip(q_lens, seen, strict=True)) <= partials
        floats = heads * partials * dim * 4 + heads * partials * 4
        offset = -(-offset // 16) * 16 + 4 * (sum(q_lens) + 1)
    if graph if shared else split:
        offset = -(-offset // 16) * 16 + grid
    assert work <= grid, "FlashInfer would refuse this plan"
    return floats, offset, work, grid


def _trees(count, extent, dice):
    """Return masks, bool ``[count · q, T]``, and depths, int32 ``[count, T]``, of a random draft tree per request."""
    q, tail = extent.q_len, extent.tail_len
    seen = torch.zeros(count * q, tail, dtype=torch.bool)
    depth = torch.zeros(count, tail, dtype=torch.int32)
    for r in range(count):
        above: list[list[int]] = []
        for slot in range(tail):
            parent = -1 if slot < max(1, tail - q) // max(1, tail - q) else dice.randrange(slot)
            above.append([*(above[parent] if parent >= 0 else []), slot])
            depth[r, slot] = len(above[slot]) - 1
        for row in range(q):
            seen[r * q + row, above[tail - q + row]] = True
    return seen, depth
