"""Tests of the tile scheduler: its Gluon source runs here over integers, because Gluon has no interpreter."""

from __future__ import annotations

import random
from types import FunctionType, SimpleNamespace

import pytest
import torch

from draftmark_cuda_triton.heuristics import common
from plugins.cuda_triton.tests import helpers

try:
    from draftmark_cuda_triton import kernels_sm90
except (ImportError, AttributeError):
    pytest.skip("this Triton has no Gluon as `kernels_sm90` uses it", allow_module_level=True)


class Words:
    """Models a pointer to int32 words; a read or write out of range fails."""

    def __init__(self, words, offset=0):
        self.words, self.offset = words, offset

    def __add__(self, offset):
        return Words(self.words, self.offset + offset)

    @property
    def value(self):
        assert self.offset >= 0
        return self.words[self.offset]

    @value.setter
    def value(self, word):
        assert self.offset >= 0
        self.words[self.offset] = word


def scheduler_function(name, num_ctas):
    """Return a function of `kernels_sm90.tile_scheduler` as one of `num_ctas` CTAs runs it."""

    def add(pointer, number, sem):
        before = pointer.value
        pointer.value += number
        return before

    tile_scheduler = kernels_sm90.tile_scheduler
    language = SimpleNamespace(
        load=lambda pointer: pointer.value, store=lambda pointer, word: setattr(pointer, "value", word),
        atomic_add=add, minimum=min, num_programs=lambda axis: num_ctas,
    )  # fmt: skip
    known = {"gl": language, "HEADER_WORDS": tile_scheduler.HEADER_WORDS.value, "WorkTile": tile_scheduler.WorkTile}
    return FunctionType(getattr(tile_scheduler, name).fn.__code__, known)


def locate(work_tile, group):
    """Return the request, the index of its row tile of 128 packed rows, and the KV head of a work tile."""
    # head_offset can be above 0, because a row tile can begin in the middle of a row's query heads.
    assert 0 <= work_tile.head_offset < group
    packed = work_tile.row * group + work_tile.head_offset
    assert packed % 128 == 0
    return work_tile.request, packed // 128, work_tile.head


def test_header_size_matches_sizing():
    """The kernel's header in words equals the header for which buffers are sized, in rows of two words."""
    assert kernels_sm90.tile_scheduler.HEADER_WORDS.value == 2 * common.SCHEDULE_HEADER_ROWS


@pytest.mark.parametrize("num_ctas", [1, 5, 132])
@pytest.mark.parametrize(
    ("heads", "heads_in_l2"), [(1, 1), (8, 8), (8, 4), (8, 3), (10, 4), (5, 1), (3, 2)], ids=lambda value: str(value)
)
def test_each_row_tile_of_each_head_is_taken_once(num_ctas, heads, heads_in_l2):
    """In each layer the CTAs take each row tile of each KV head once, one group of heads after another."""
    # CTAs finish their tiles in random order. A CTA leaves this loop when no work is left.
    get_next_tile = scheduler_function("get_next_tile", num_ctas)
    load_work_tile = scheduler_function("load_work_tile", num_ctas)
    chance = random.Random(100 * heads + 10 * heads_in_l2 + num_ctas)
    for number, group in ((0, 1), (1, 7), (7, 4), (40, 12)):
        rows = [chance.randrange(1, 300) for _ in range(3)]
        prefix, starts = [chance.randrange(100) for _ in rows], [0]
        for count in rows:
            starts.append(starts[-1] + count)
        tiles = [(chance.randrange(3), chance.randrange(9)) for _ in range(number)]
        # The last two words are unused entries (-1): they must never be read as a row tile.
        row_tiles = [0, number, heads_in_l2, 0, *(word for tile in tiles for word in tile), -1, -1]
        args = (Words(row_tiles), number, heads_in_l2, Words(prefix), Words(starts), heads, group, 128)
        for _ in range(2):
            found = []
            free = [(cta, load_work_tile(cta, *args)) for cta in range(num_ctas)]
            while free:
                cta, one = free.pop(chance.randrange(len(free)))
                if one.rows:
                    found.append(one)
                    tile_index = get_next_tile(Words(row_tiles), number * heads)
                    free.append((cta, load_work_tile(tile_index, *args)))
            assert row_tiles[0] == 0, "the next layer takes from the start"
            assert sorted(locate(one, group) for one in found) == sorted(
                (*tile, head) for tile in tiles for head in range(heads)
            )
            assert all(
                (one.q_begin, one.rows, one.prefix_len) == (starts[one.request], rows[one.request], prefix[one.request])
                for one in found
            )
        order = [locate(load_work_tile(index, *args), group) for index in range(number * heads)]
        assert order == [
            (*tile, head)
            for first in range(0, heads, heads_in_l2)
            for tile in tiles
            for head in range(first, min(first + heads_in_l2, heads))
        ]
        assert load_work_tile(number * heads, *args).rows == 0


def split_tiles(cta, heads, window_left, rows, prefix, starts, tiles, work, num_splits):
    """Return the work tiles of a CTA's split, for row tiles of 16 packed rows and a group of 2.

    Args:
        tiles: the rows of `row_tiles`, header included.
        work: the split records.

    Returns:
        For each work tile: request, row tile, head, first key tile, end of the key tiles, partial (`KvRange`).
    """
    tile_scheduler = kernels_sm90.tile_scheduler
    language = SimpleNamespace(
        load=lambda pointer: pointer.value, minimum=min, maximum=max, program_id=lambda axis: cta,
        where=lambda condition, yes, no: yes if condition else no,
    )  # fmt: skip
    split_packed_row = FunctionType(kernels_sm90.pack_gqa.split_packed_row.fn.__code__, {})
    known = {
        "gl": language,
        "HEADER_WORDS": tile_scheduler.HEADER_WORDS.value,
        "split_packed_row": split_packed_row,
        "WorkTile": tile_scheduler.WorkTile,
        "KvRange": tile_scheduler.KvRange,
    }
    known["row_tile_kv_range"] = FunctionType(tile_scheduler.row_tile_kv_range.fn.__code__, known)
    next_split_tile = FunctionType(tile_scheduler.next_split_tile.fn.__code__, known)
    constants = SimpleNamespace(WINDOW=window_left >= 0, BLOCK_M=16, BLOCK_N=32, OVERHEAD_TILES=common.OVERHEAD_TILES)
    inv_group = ((1 << 23) + 1) // 2
    split = cta // heads
    record = work[split] if split < num_splits else (0, 0, 0)
    cursor = (record[0], record[1], record[2], 0)
    words = [word for row in tiles for word in row]
    args = (Words(words), tiles[0][1], tiles[1][1], Words(prefix), Words(starts), heads, 2, inv_group, window_left)
    found = []
    while True:
        item, kv_range, cursor = next_split_tile(cursor, *args, constants)
        assert min(item + kv_range) >= 0, "`receive` branches on a sum of words, none of which may be negative"
        if not item.rows:
            return found
        expected = (starts[item.request], rows[item.request], prefix[item.request])
        assert (item.q_begin, item.rows, item.prefix_len) == expected
        found.append((item.request, (item.row * 2 + item.head_offset) // 16, item.head, *kv_range))


@pytest.mark.parametrize("window_left", [-1, 300])
@pytest.mark.parametrize("heads", [1, 3])
def test_split_row_tiles_follow_the_schedule(heads, window_left):
    """For each head the splits contain each key tile that a row tile sees once; no two share a partial result."""
    from draftmark_cuda_triton.launch import metadata, operands

    chance, tiles_per_request = random.Random(heads), set()
    config, params = (
        common.KernelConfig(16, 32, 4, 2, 2),
        operands.AttentionParams(heads, 2, 64, 16, 1.0, window_left=window_left),
    )
    for _ in range(20):
        count, num_splits = chance.randrange(1, 6), chance.randrange(2, 20)
        prefix = [chance.choice((0, 5, chance.randrange(4000))) for _ in range(count)]
        rows = [chance.choice((1, 8, chance.randrange(40))) for _ in range(count)]
        if chance.random() < 0.4:
            rows = [17 + n for n in range(count)]  # each request has three row tiles
        starts = [sum(rows[:n]) for n in range(count + 1)]
        if not starts[-1]:
            continue
        tensors = (torch.tensor(one, dtype=torch.int32, device=helpers.DEVICE) for one in (prefix, starts))
        table = torch.ones(count, 300, dtype=torch.int32, device=helpers.DEVICE)
        tiles = helpers.poison(2 + common.max_row_tiles(config, 2, starts[-1], count), 2, dtype=torch.int32)
        slots, work = (
            helpers.poison(starts[-1], dtype=torch.int64),
            helpers.poison(2 * num_splits, 4, dtype=torch.int32),
        )
        metadata.write_metadata_prefill(
            params, config, starts[-1], *tensors, table, slots, tiles, None, work, num_splits, num_splits * heads
        )  # fmt: skip
        if not tiles[1, 1]:
            continue
        tiles_per_request.add(int(tiles[1, 1]))
        args = heads, window_left, rows, prefix, starts, tiles.tolist(), work.tolist(), num_splits
        items = [one for cta in range((num_splits + 1) * heads) for one in split_tiles(cta, *args)]
        met, partials = set(), [(head, partial) for _, _, head, *_, partial in items if partial]
        for request, m, head, first, stop, partial in items:
            own = {(request, m, head, key) for key in range(first, stop)}
            assert own and not own & met
            met |= own
            assert (partial == 0) == (len([1 for one in items if one[:3] == (request, m, head)]) == 1)
        assert met == visible_key_tiles(rows, prefix, heads, window_left)
        assert len(set(partials)) == len(partials)
        assert all(1 <= partial <= 2 * num_splits for _, partial in partials)
    assert tiles_per_request == {1, 3}


def visible_key_tiles(rows, prefix, heads, window_left):
    """Return (request, row tile, head, key tile) for each key tile with a key that a row of the row tile sees."""
    found = set()
    for request, (count, before) in enumerate(zip(rows, prefix, strict=True)):
        for packed in range(2 * count):
            row = packed // 2
            low = 0 if window_left < 0 else max(before + row - window_left, 0)
            keys = range(low // 32, (before + row) // 32 + 1)
            found |= {(request, packed // 16, head, key) for head in range(heads) for key in keys}
    return found
