"""Ragged causal batches against float64."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile
from draftmark.devices import device_profile


def run(
    bench, lens, rows, *, page=16, dim=64, window_left=-1, cap=0.0, dtype=torch.float32, block_m=16, sinks=None,
    kv_dtype=None, scales=(None, None), attention=None, room=1 << 30, pieces=1, programs=0,
):  # fmt: skip
    """A ragged batch made of uniform problems' pieces, through write_metadata_ragged and attend_extend.

    attention: its tile is what the hooks choose. room: keys of a head that L2 keeps. pieces: of the row tiles of a KV
    head, where those may be cut; on so many programs.

    Returns the worse error of the output and of the log-sum-exp.
    """
    from draftmark_cuda_triton import extend, launch, tiling

    tile = tiling.Tile(block_m, 32, 4, 2, 2)
    width = -(-max(n + t for n, t in zip(lens, rows, strict=True)) // page)
    generator = torch.Generator().manual_seed(sum(lens) + sum(rows))
    table = (torch.randperm(len(lens) * width, generator=generator).view(len(lens), width) + 1).int()
    pool = (1 + len(lens) * width, page, 2, dim)
    k, v = (torch.full(pool, float("nan"), dtype=torch.float32).to(kv_dtype or dtype) for _ in range(2))
    real = [1.0 if one is None else one for one in scales]
    q = torch.randn(sum(rows), 4, dim, generator=generator).to(dtype)
    slots = bench.filled((k, v), table, lens, rows, generator)
    exact = [cache.double() * factor for cache, factor in zip((k, v), real, strict=True)]
    expected_out, expected_lse = bench.ragged_oracle(q, *exact, lens, rows, table, window_left, cap, sinks)
    prefix = torch.tensor(lens, dtype=torch.int32, device=bench.device)
    indptr = torch.tensor([0, *rows], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(bench.device)
    q, k, v, table = (x.to(bench.device) for x in (q, k, v, table))
    if attention is not None:
        chosen = tiling.choose(attention, device_profile("cuda"), 4096, extend=True)
        if pieces > 1:
            chosen = tiling.cut_tile(attention, device_profile("cuda"), chosen, rows, lens) or chosen
        where = extend.has_one_pitch(k, v), extend.has_boxes(k, v)
        tile = tiling.for_cache(attention, device_profile("cuda"), chosen, *where)
    sinks = sinks if sinks is None else sinks.to(bench.device)
    factors = (one if one is None else torch.tensor([one], device=bench.device) for one in scales)
    shape = launch.Attention(2, 2, dim, page, dim**-0.5, cap, window_left, room=room)
    tiles = bench.poison(tiling.AGENDA_ROWS + tiling.ragged_tiles(tile, 2, len(q), len(lens)), 2, dtype=torch.int32)
    mapping, out = bench.poison(len(q), dtype=torch.int64), bench.poison(*q.shape, dtype=dtype)
    cut, schedule = None, ()
    if pieces > 1:
        work, cells = bench.poison(2 * pieces, 4, dtype=torch.int32), 2 * pieces * 2 * tile.block_m
        cut = launch.Cut(pieces, programs or 2 * pieces, work, bench.poison(cells, dim), bench.poison(cells))
        schedule = None, work, pieces, cut.programs
    launch.write_metadata_ragged(shape, tile, len(q), prefix, indptr, table, mapping, tiles, *schedule)
    lse = bench.poison(*q.shape[:2])
    launch.attend_extend(shape, tile, len(q), q, k, v, *factors, prefix, indptr, table, tiles, out, lse, sinks, cut)
    assert mapping.tolist() == slots
    # The agenda is as it was made, for the next layer: nothing taken, all row tiles, so many heads side by side.
    number = sum(-(-t * 2 // tile.block_m) for t in rows)
    longest = max(n + t for n, t in zip(lens, rows, strict=True) if t)
    by_line = int(tiles[1, 1])
    assert tiles[: tiling.AGENDA_ROWS].tolist() == [[0, number], [1 if room < 2 * longest else 2, by_line]]
    assert by_line == 0 or (by_line == 1 and pieces > 1)
    return max(bench.error(out, expected_out), bench.error(lse, expected_lse))


@pytest.mark.parametrize("block_m", [16, 48, 64])
def test_prefill_and_chunks(bench, block_m):
    """Fresh prompts, chunks behind a prefix, single tokens and padded requests without rows, in one batch; row tiles of
    no power of two too.
    """
    assert run(bench, (0, 40, 7, 0, 64), (37, 9, 1, 0, 20), block_m=block_m) < 1e-5


@pytest.mark.parametrize("pieces", [2, 5, 40])
@pytest.mark.parametrize("block_m", [16, 48])
@pytest.mark.parametrize(("lens", "rows"), [
    ((300,), (1,)), ((0, 40, 7, 0, 264), (37, 9, 1, 0, 20)), ((0, 0), (64, 5)), ((700, 3, 0, 90), (5, 0, 70, 1)),
])  # fmt: skip
def test_row_tiles_cut_by_their_keys(bench, lens, rows, block_m, pieces):
    """A few rows behind a long prefix beside prompts and single tokens, in pieces fewer and more than row tiles."""
    sinks = torch.tensor([1.5, float("-inf"), -2.0, 4.0])
    for told in ({"block_m": block_m}, {"sinks": sinks, "cap": 9.0, "window_left": 50, "block_m": block_m}):
        assert run(bench, lens, rows, pieces=pieces, **told) < 1e-5


@pytest.mark.parametrize("heads", [1, 2, 5])
@pytest.mark.parametrize(("head_dim", "window_left"), [(64, -1), (64, 300), (256, -1)])
def test_the_host_finds_what_the_schedule_finds(bench, heads, head_dim, window_left):
    """Of lengths that it knows, whether row tiles are cut: for long prefixes of few rows, prompts, many requests. Of
    more row tiles than programs the schedule cuts all lines that are not too short, for the host may say no before.
    """
    from draftmark_cuda_triton import launch, tiling

    chance, found = random.Random(heads), set()
    tile, device = tiling.Tile(16, 32, 4, 2, 2), DeviceProfile("cuda", 80, 12)
    attention = AttentionShape(2 * heads, heads, head_dim, 16, window_left=window_left)
    shape = launch.Attention(heads, 2, head_dim, 16, 1.0, window_left=window_left)
    pieces = tiling.shares(attention, device, tile)
    batches = [((8999,) * count, (60,) * count) for count in range(1, 9)]
    for _ in range(24):
        count = chance.randrange(1, 9)
        longest, most = chance.choice((1, 400, 9000)), chance.choice((1, 8, 60))
        lens = tuple(chance.randrange(longest) for _ in range(count))
        rows = tuple(chance.choice((most, chance.randrange(most + 1))) for _ in range(count))
        batches += [(lens, rows)] if any(rows) else []
    for lens, rows in batches:
        count = len(rows)
        prefix = torch.tensor(lens, dtype=torch.int32, device=bench.device)
        indptr = torch.tensor([0, *rows]).cumsum(0).int().to(bench.device)
        table = torch.ones(count, 600, dtype=torch.int32, device=bench.device)
        number = tiling.ragged_tiles(tile, 2, sum(rows), count)
        tiles = bench.poison(tiling.AGENDA_ROWS + number, 2, dtype=torch.int32)
        slots, work = bench.poison(sum(rows), dtype=torch.int64), bench.poison(2 * pieces, 4, dtype=torch.int32)
        launch.write_metadata_ragged(
            shape, tile, sum(rows), prefix, indptr, table, slots, tiles, None, work, pieces, device.num_sms * 2
        )  # fmt: skip
        asked = tiling.pays_cutting(attention, device, tile, rows, lens)
        is_one = int(tiles[0, 1]) * heads <= device.num_sms * 2
        found.add((is_one, asked))
        spans = spans_of(tiles, lens, rows, window_left)
        line = sum(end - first + tiling.ITEM_COST for first, end in spans)
        is_cut = asked if is_one else line // tiling.LEAST_SHARE > len(spans)
        assert bool(tiles[1, 1]) == is_cut and is_cut >= asked, (lens, rows)
        assert_pieces_are_the_line(tiles, work, pieces, lens, rows, window_left)
    # Under a window more row tiles than programs have too few keys.
    assert found | {(False, True)} == {(is_one, cut) for is_one in (True, False) for cut in (True, False)}
    assert window_left >= 0 or (False, True) in found


@pytest.mark.parametrize("room", [1 << 30, 0])
@pytest.mark.parametrize("heads", [1, 3])
def test_the_longest_row_tiles_are_taken_first(bench, heads, room):
    """Of all requests where their keys have room together; else those of the longest request, then of the next."""
    from draftmark_cuda_triton import launch, tiling

    chance, tile, group = random.Random(heads), tiling.Tile(16, 32, 4, 2, 2), 3
    for _ in range(12):
        count = chance.randrange(1, 40)
        lens = [chance.choice((0, 0, 5, chance.randrange(3000))) for _ in range(count)]
        rows = [chance.choice((0, 1, 16, chance.randrange(60))) for _ in range(count)]
        keys = sum(n + t for n, t in zip(lens, rows, strict=True) if t)
        shape = launch.Attention(
            heads, group, 64, 16, 1.0, room=min(room, keys * heads) if chance.random() < 0.5 else room
        )
        indptr = torch.tensor([0, *rows]).cumsum(0).int().to(bench.device)
        number = tiling.ragged_tiles(tile, group, sum(rows), count)
        tiles = bench.poison(tiling.AGENDA_ROWS + number, 2, dtype=torch.int32)
        launch.write_metadata_ragged(
            shape, tile, sum(rows), torch.tensor(lens, dtype=torch.int32, device=bench.device), indptr,
            torch.ones(count, 200, dtype=torch.int32, device=bench.device), bench.poison(sum(rows), dtype=torch.int64),
            tiles,
        )  # fmt: skip
        every = [(r, m) for r, t in enumerate(rows) for m in range(-(-t * group // 16))]
        if room:
            every.sort(key=lambda one: (-(lens[one[0]] * group + (one[1] + 1) * 16), one[0]))
        else:
            every.sort(key=lambda one: (-lens[one[0]] - rows[one[0]], one[0], -one[1]))
        found = [tuple(one) for one in tiles[tiling.AGENDA_ROWS :].tolist()]
        assert int(tiles[0, 1]) == len(every) and found == every + [(-1, 0)] * (number - len(every))


def spans_of(tiles, lens, rows, window_left):
    """First tile of 32 keys that each row tile of 16 packed rows of a group of 2 sees, and the one past the last."""
    from draftmark_cuda_triton.tiling import AGENDA_ROWS

    found = []
    for request, m in tiles[AGENDA_ROWS : AGENDA_ROWS + int(tiles[0, 1])].tolist():
        highest = min((m * 16 + 15) // 2, rows[request] - 1)
        first = 0 if window_left < 0 else max(lens[request] + m * 8 - window_left, 0) // 32
        found.append((first, (lens[request] + highest + 32) // 32))
    return found


def assert_pieces_are_the_line(tiles, work, pieces, lens, rows, window_left):
    """Walking every piece as the kernels do meets each tile of keys of each row tile once; cuts name who has a part."""
    from draftmark_cuda_triton.tiling import ITEM_COST

    count, high = int(tiles[0, 1]), int(tiles[1, 1])
    told = work[:pieces].tolist()
    if not high:
        assert not any(length for _, _, length, _ in told)
        assert not any(parts for _, _, parts, _ in work[pieces : pieces + min(count, pieces - 1)].tolist())
        return
    firsts, ends = zip(*spans_of(tiles, lens, rows, window_left), strict=True)
    requests = count // high
    line = [number % requests * high + number // requests for number in range(count)]
    met, held = [], {}
    for number, (item, start, length, _) in enumerate(told):
        half = 0
        while length > 0:
            one = line[item]
            here = [(item, t) for t in range(start, min(start + length, ends[one]))]
            met += here
            if here:
                held.setdefault(item, []).append((number, half))
            length -= ends[one] + ITEM_COST - start
            item, half = item + 1, 1
            start = firsts[line[item]] if item < count else 0
    assert met == [(item, t) for item in range(count) for t in range(firsts[line[item]], ends[line[item]])]
    cuts = [(item, of[0][0], len(of), of[0][1]) for item, of in held.items() if len(of) > 1]
    said = work[pieces : pieces + min(count, pieces - 1)].tolist()
    assert [tuple(one) for one in said[: len(cuts)]] == cuts
    assert not any(parts for _, _, parts, _ in said[len(cuts) :])


@pytest.mark.parametrize("window_left", [0, 5, 50])
def test_window(bench, window_left):
    """Rows see window_left positions to their left."""
    assert run(bench, (0, 70), (40, 11), window_left=window_left) < 1e-5


@pytest.mark.parametrize("page", [1, 5, 128])
def test_pages(bench, page):
    """Any page size."""
    assert run(bench, (3, 30), (20, 5), page=page, dim=80) < 1e-5


def test_half_precision(bench):
    """bf16 stays within its rounding."""
    assert run(bench, (3, 30), (20, 5), dtype=torch.bfloat16) < 4e-3


@pytest.mark.parametrize("window_left", [-1, 5])
def test_sinks(bench, window_left):
    """Each head's sink takes its part of every row, also of rows whose window is all they see."""
    sinks = torch.tensor([1.5, float("-inf"), -2.0, 4.0])
    assert run(bench, (0, 70, 3), (40, 11, 0), window_left=window_left, sinks=sinks) < 1e-5


def test_soft_cap(bench):
    """cap · tanh(logit / cap)."""
    assert run(bench, (0, 30), (20, 5), cap=0.5) < 1e-5


@pytest.mark.parametrize("scales", [(None, None), (0.5, None), (None, 2.0), (0.5, 2.0)])
def test_each_scale_of_e4m3_counts_alone(bench, scales):
    """One that is not there is 1; a factor of K changes the log-sum-exp, one of V the output alone."""
    assert run(bench, (3, 30), (20, 5), kv_dtype=torch.float8_e4m3fn, scales=scales) < 1e-5


@pytest.mark.parametrize("pieces", [1, 5])
def test_a_launch_for_no_row_tile_writes_nothing(bench, pieces):
    """It is how kernels are compiled before they are needed (`Extend._get_ready`)."""
    from draftmark_cuda_triton import launch, tiling

    tile, shape = tiling.Tile(16, 32, 4, 2, 2), launch.Attention(2, 2, 64, 16, 0.125)
    nothing = torch.zeros(2 * pieces * 4, dtype=torch.int32, device=bench.device)
    lens, table = torch.ones(3, dtype=torch.int32), torch.ones(3, 4, dtype=torch.int32)
    q, k = torch.ones(9, 4, 64, device=bench.device), torch.ones(2, 16, 2, 64, device=bench.device)
    indptr = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    out, partial = bench.poison(9, 4, 64), bench.poison(2 * pieces * 2 * 16, 64)
    cut = launch.Cut(pieces, 10, nothing, partial, partial[:, 0]) if pieces > 1 else None
    steps = (one.to(bench.device) for one in (lens, indptr, table))
    launch.attend_extend(shape, tile, 9, q, k, k, None, None, *steps, nothing, out, None, None, cut)
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
def test_the_hooks_own_tiles(bench, dim, page, dtype, kv_dtype, window_left, cap):
    """On a GPU: every warp group has full, partial and empty row tiles, over one tile of keys and over many."""
    names = [str(one).removeprefix("torch.") for one in (dtype, kv_dtype or dtype)]
    attention = AttentionShape(4, 2, dim, page, *names)
    chance = random.Random(dim + page)
    for _ in range(4):
        lens = tuple(chance.choice((0, 1, 63, 64, 127, 128, chance.randrange(1500))) for _ in range(5))
        rows = tuple(chance.choice((0, 1, 31, 32, 33, 64, 96, chance.randrange(700))) for _ in range(5))
        rows = rows if any(rows) else (1,) * 5
        told = {"page": page, "dim": dim, "window_left": window_left, "cap": cap, "dtype": dtype, "kv_dtype": kv_dtype}
        assert run(bench, lens, rows, attention=attention, **told) < 5e-3, (lens, rows)
        pieces, few = chance.choice((2, 5, 33)), tuple(min(n, 30) for n in rows)
        for some in (rows, few):
            assert run(bench, lens, some, attention=attention, pieces=pieces, **told) < 5e-3, (lens, some, pieces)


@pytest.mark.device
@pytest.mark.parametrize("room", [1 << 30, 1000, 1])
@pytest.mark.parametrize(("dim", "page"), [(64, 16), (128, 1), (256, 64)])
def test_programs_take_every_row_tile_once(bench, dim, page, room):
    """On a GPU: fewer items than programs and many more, one head after the other or side by side, empty requests."""
    attention = AttentionShape(4, 2, dim, page)
    told = {"page": page, "dim": dim, "dtype": torch.bfloat16, "attention": attention, "room": room}
    for lens, rows in (((0,), (1,)), ((0, 700, 0), (40, 0, 9)), ((0,) * 12, (700,) * 12)):
        assert run(bench, lens, rows, **told) < 5e-3, (lens, rows)


@pytest.mark.parametrize(
    ("num_kv_heads", "lens", "rows", "room", "together"),
    [
        (8, (0,), (100,), 800, 8), (8, (0,), (100,), 799, 4), (8, (60, 0), (40, 99), 300, 3), (8, (0,), (100,), 99, 1),
        (3, (0, 0), (5, 7), 14, 2), (1, (0,), (9,), 1, 1), (5, (0, 0), (0, 0), 1, 1),
    ],
)  # fmt: skip
def test_heads_side_by_side_have_room_for_their_keys(bench, num_kv_heads, lens, rows, room, together):
    """Of the longest request; in rounds of about as many."""
    from draftmark_cuda_triton import launch, tiling

    prefix = torch.tensor(lens, dtype=torch.int32, device=bench.device)
    indptr = torch.tensor([0, *rows]).cumsum(0).int().to(bench.device)
    table = torch.ones(len(lens), 20, dtype=torch.int32, device=bench.device)
    shape, tile = launch.Attention(num_kv_heads, 1, 64, 16, 1.0, room=room), tiling.Tile(16, 32, 4, 2, 2)
    tiles = bench.poison(tiling.AGENDA_ROWS + tiling.ragged_tiles(tile, 1, sum(rows), len(rows)), 2, dtype=torch.int32)
    slots = bench.poison(max(1, sum(rows)), dtype=torch.int64)
    launch.write_metadata_ragged(shape, tile, sum(rows), prefix, indptr, table, slots, tiles)
    assert tiles[: tiling.AGENDA_ROWS].tolist() == [[0, sum(-(-n // 16) for n in rows)], [together, 0]]
