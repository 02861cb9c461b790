"""Schedule of prefill: splits of row tiles, their order, and the KV heads that run concurrently."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile
from plugins.cuda_triton.tests import helpers


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize(("head_dim", "window_left"), [(64, -1), (64, 300), (256, -1)])
def test_host_and_device_agree_on_splitting(heads, head_dim, window_left):
    """Host and device make the same decision to split row tiles, if each CTA has at most one row tile.

    With more row tiles only the host estimates the benefit; the device splits every batch with enough key tiles.
    """
    from draftmark_cuda_triton.heuristics import common, split_kv
    from draftmark_cuda_triton.launch import metadata, operands

    chance, found = random.Random(heads), set()
    config, device = common.KernelConfig(16, 32, 4, 2, 2), DeviceProfile("cuda", 80, 12)
    attention = AttentionShape(2 * heads, heads, head_dim, 16, window_left=window_left)
    shape = operands.AttentionParams(heads, 2, head_dim, 16, 1.0, window_left=window_left)
    num_splits = split_kv.prefill_splits(attention, device, config)
    batches = [((8999,) * count, (60,) * count) for count in range(1, 9)]
    for _ in range(24):
        count = chance.randrange(1, 9)
        longest, most = chance.choice((1, 400, 9000)), chance.choice((1, 8, 60))
        lens = tuple(chance.randrange(longest) for _ in range(count))
        rows = tuple(chance.choice((most, chance.randrange(most + 1))) for _ in range(count))
        batches += [(lens, rows)] if any(rows) else []
    for lens, rows in batches:
        count = len(rows)
        prefix = torch.tensor(lens, dtype=torch.int32, device=helpers.DEVICE)
        indptr = torch.tensor([0, *rows]).cumsum(0).int().to(helpers.DEVICE)
        table = torch.ones(count, 600, dtype=torch.int32, device=helpers.DEVICE)
        number = common.max_row_tiles(config, 2, sum(rows), count)
        tiles = helpers.poison(common.SCHEDULE_HEADER_ROWS + number, 2, dtype=torch.int32)
        slots, work = helpers.poison(sum(rows), dtype=torch.int64), helpers.poison(2 * num_splits, 4, dtype=torch.int32)
        metadata.write_metadata_prefill(
            shape, config, sum(rows), prefix, indptr, table, slots, tiles, None, work, num_splits, device.num_sms * 2
        )  # fmt: skip
        host_pays = split_kv.ExtendTiles(attention, device, config).splitting_pays(rows, lens)
        one_tile_a_cta = int(tiles[0, 1]) * heads <= device.num_sms * 2
        found.add((one_tile_a_cta, host_pays))
        spans = kv_ranges_of(tiles, lens, rows, window_left)
        line = sum(end - first + common.OVERHEAD_TILES for first, end in spans)
        is_split = host_pays if one_tile_a_cta else line // split_kv.MIN_SPLIT_TILES > len(spans)
        assert bool(tiles[1, 1]) == is_split and is_split >= host_pays, (lens, rows)
        assert_splits_cover_the_line(tiles, work, num_splits, lens, rows, window_left)
    # All four cases occur, except one: with a window, batches of more row tiles than CTAs have too few keys to split.
    assert found | {(False, True)} == {
        (one_tile_a_cta, split) for one_tile_a_cta in (True, False) for split in (True, False)
    }
    assert window_left >= 0 or (False, True) in found


@pytest.mark.parametrize("l2_keys", [1 << 30, 0])
@pytest.mark.parametrize("heads", [1, 3])
def test_longest_row_tiles_come_first(heads, l2_keys):
    """The longest row tiles come first: over all requests if L2 holds their keys, else request by request."""
    from draftmark_cuda_triton.heuristics import common
    from draftmark_cuda_triton.launch import metadata, operands

    chance, config, group = random.Random(heads), common.KernelConfig(16, 32, 4, 2, 2), 3
    for _ in range(12):
        count = chance.randrange(1, 40)
        lens = [chance.choice((0, 0, 5, chance.randrange(3000))) for _ in range(count)]
        rows = [chance.choice((0, 1, 16, chance.randrange(60))) for _ in range(count)]
        keys = sum(n + t for n, t in zip(lens, rows, strict=True) if t)
        shape = operands.AttentionParams(
            heads, group, 64, 16, 1.0, l2_keys=min(l2_keys, keys * heads) if chance.random() < 0.5 else l2_keys
        )
        indptr = torch.tensor([0, *rows]).cumsum(0).int().to(helpers.DEVICE)
        number = common.max_row_tiles(config, group, sum(rows), count)
        tiles = helpers.poison(common.SCHEDULE_HEADER_ROWS + number, 2, dtype=torch.int32)
        metadata.write_metadata_prefill(
            shape, config, sum(rows), torch.tensor(lens, dtype=torch.int32, device=helpers.DEVICE), indptr,
            torch.ones(count, 200, dtype=torch.int32, device=helpers.DEVICE),
            helpers.poison(sum(rows), dtype=torch.int64), tiles,
        )  # fmt: skip
        expected = [(r, m) for r, t in enumerate(rows) for m in range(-(-t * group // 16))]
        if l2_keys:
            expected.sort(key=lambda one: (-(lens[one[0]] * group + (one[1] + 1) * 16), one[0]))
        else:
            expected.sort(key=lambda one: (-lens[one[0]] - rows[one[0]], one[0], -one[1]))
        found = [tuple(one) for one in tiles[common.SCHEDULE_HEADER_ROWS :].tolist()]
        assert int(tiles[0, 1]) == len(expected) and found == expected + [(-1, 0)] * (number - len(expected))


def kv_ranges_of(tiles, lens, rows, window_left):
    """Return the KV tile range [first, end) of each row tile: 32 keys, 16 packed rows, group of 2."""
    from draftmark_cuda_triton.heuristics.common import SCHEDULE_HEADER_ROWS

    found = []
    for request, m in tiles[SCHEDULE_HEADER_ROWS : SCHEDULE_HEADER_ROWS + int(tiles[0, 1])].tolist():
        highest = min((m * 16 + 15) // 2, rows[request] - 1)
        first = 0 if window_left < 0 else max(lens[request] + m * 8 - window_left, 0) // 32
        found.append((first, (lens[request] + highest + 32) // 32))
    return found


def assert_splits_cover_the_line(tiles, work, num_splits, lens, rows, window_left):
    """Assert that the splits read each KV tile of each row tile once and the combine records list split row tiles."""
    from draftmark_cuda_triton.heuristics.common import OVERHEAD_TILES

    count, tiles_per_request = int(tiles[0, 1]), int(tiles[1, 1])
    options = work[:num_splits].tolist()
    if not tiles_per_request:
        assert not any(length for _, _, length, _ in options)
        assert not any(parts for _, _, parts, _ in work[num_splits : num_splits + min(count, num_splits - 1)].tolist())
        return
    firsts, ends = zip(*kv_ranges_of(tiles, lens, rows, window_left), strict=True)
    requests = count // tiles_per_request
    line = [number % requests * tiles_per_request + number // requests for number in range(count)]
    met, parts_of = [], {}
    for number, (item, start, length, _) in enumerate(options):
        half = 0
        while length > 0:
            one = line[item]
            here = [(item, t) for t in range(start, min(start + length, ends[one]))]
            met += here
            if here:
                parts_of.setdefault(item, []).append((number, half))
            length -= ends[one] + OVERHEAD_TILES - start
            item, half = item + 1, 1
            start = firsts[line[item]] if item < count else 0
    assert met == [(item, t) for item in range(count) for t in range(firsts[line[item]], ends[line[item]])]
    row_tile = [tiles[2 + one].tolist() for one in line]  # request and index
    expected = [
        (row_tile[item][0], of[0][0], len(of), 2 * row_tile[item][1] + of[0][1])
        for item, of in parts_of.items()
        if len(of) > 1
    ]
    records = work[num_splits : num_splits + min(count, num_splits - 1)].tolist()
    assert [tuple(one) for one in records[: len(expected)]] == expected
    assert not any(parts for _, _, parts, _ in records[len(expected) :])


@pytest.mark.parametrize(
    ("num_kv_heads", "lens", "rows", "l2_keys", "together"),
    [
        (8, (0,), (100,), 800, 8), (8, (0,), (100,), 799, 4), (8, (60, 0), (40, 99), 300, 3), (8, (0,), (100,), 99, 1),
        (3, (0, 0), (5, 7), 14, 2), (1, (0,), (9,), 1, 1), (5, (0, 0), (0, 0), 1, 1),
    ],
)  # fmt: skip
def test_concurrent_heads_fit_l2(num_kv_heads, lens, rows, l2_keys, together):
    """KV heads run concurrently as far as L2 holds the longest request's keys, divided evenly into rounds."""
    from draftmark_cuda_triton.heuristics import common
    from draftmark_cuda_triton.launch import metadata, operands

    prefix = torch.tensor(lens, dtype=torch.int32, device=helpers.DEVICE)
    indptr = torch.tensor([0, *rows]).cumsum(0).int().to(helpers.DEVICE)
    table = torch.ones(len(lens), 20, dtype=torch.int32, device=helpers.DEVICE)
    shape, config = (
        operands.AttentionParams(num_kv_heads, 1, 64, 16, 1.0, l2_keys=l2_keys),
        common.KernelConfig(16, 32, 4, 2, 2),
    )
    tiles = helpers.poison(
        common.SCHEDULE_HEADER_ROWS + common.max_row_tiles(config, 1, sum(rows), len(rows)), 2, dtype=torch.int32
    )
    slots = helpers.poison(max(1, sum(rows)), dtype=torch.int64)
    metadata.write_metadata_prefill(shape, config, sum(rows), prefix, indptr, table, slots, tiles)
    assert tiles[: common.SCHEDULE_HEADER_ROWS].tolist() == [[0, sum(-(-n // 16) for n in rows)], [together, 0]]
