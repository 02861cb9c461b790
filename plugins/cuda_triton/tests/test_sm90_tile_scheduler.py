"""Who takes which row tile on Hopper, by the agenda's own source over integers: Gluon has no interpreter."""

from __future__ import annotations

import random
from types import FunctionType, SimpleNamespace

import pytest
import torch

from draftmark_cuda_triton.heuristics import common

try:
    from draftmark_cuda_triton import kernels_sm90
except (ImportError, AttributeError):
    pytest.skip("this Triton has no Gluon as `kernels_sm90` uses it", allow_module_level=True)


class Words:
    """A pointer to words; reading or writing outside of them fails."""

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


def of_agenda(name, programs):
    """A function of the agenda, as one of so many programs runs it."""

    def add(pointer, number, sem):
        before = pointer.value
        pointer.value += number
        return before

    agenda = kernels_sm90.tile_scheduler
    language = SimpleNamespace(
        load=lambda pointer: pointer.value, store=lambda pointer, word: setattr(pointer, "value", word),
        atomic_add=add, minimum=min, num_programs=lambda axis: programs,
    )  # fmt: skip
    known = {"gl": language, "HEADER_WORDS": agenda.HEADER_WORDS.value, "WorkTile": agenda.WorkTile}
    return FunctionType(getattr(agenda, name).fn.__code__, known)


def place_of(item, group):
    """Request, row tile of 128 packed rows, and head of what was looked up: a tile may begin inside a row's heads."""
    assert 0 <= item.head_offset < group
    packed = item.row * group + item.head_offset
    assert packed % 128 == 0
    return item.request, packed // 128, item.head


def test_header_size_matches_sizing():
    """In words here, in rows of two where buffers are sized."""
    assert kernels_sm90.tile_scheduler.HEADER_WORDS.value == 2 * common.SCHEDULE_HEADER_ROWS


@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize(
    ("heads", "heads_in_l2"), [(1, 1), (8, 8), (8, 4), (8, 3), (10, 4), (5, 1), (3, 2)], ids=lambda value: str(value)
)
def test_each_row_tile_of_each_head_is_taken_once(programs, heads, heads_in_l2):
    """In layer after layer, whoever is free first; by heads side by side, then the next ones. Tiles of requests without
    rows are none, and a program that finds nothing ends.
    """
    take, looked_up = of_agenda("get_next_tile", programs), of_agenda("load_work_tile", programs)
    chance = random.Random(100 * heads + 10 * heads_in_l2 + programs)
    for number, group in ((0, 1), (1, 7), (7, 4), (40, 12)):
        rows = [chance.randrange(1, 300) for _ in range(3)]
        prefix, starts = [chance.randrange(100) for _ in rows], [0]
        for count in rows:
            starts.append(starts[-1] + count)
        tiles = [(chance.randrange(3), chance.randrange(9)) for _ in range(number)]
        # What is behind the row tiles is never read as one.
        agenda = [0, number, heads_in_l2, 0, *(word for tile in tiles for word in tile), -1, -1]
        given = (Words(agenda), number, heads_in_l2, Words(prefix), Words(starts), heads, group, 128)
        for _ in range(2):
            found = []
            free = [(program, looked_up(program, *given)) for program in range(programs)]
            while free:
                program, one = free.pop(chance.randrange(len(free)))
                if one.rows:
                    found.append(one)
                    free.append((program, looked_up(take(Words(agenda), number * heads), *given)))
            assert agenda[0] == 0, "the next layer takes from the start"
            assert sorted(place_of(one, group) for one in found) == sorted(
                (*tile, head) for tile in tiles for head in range(heads)
            )
            assert all(
                (one.q_begin, one.rows, one.prefix_len) == (starts[one.request], rows[one.request], prefix[one.request])
                for one in found
            )
        order = [place_of(looked_up(item, *given), group) for item in range(number * heads)]
        assert order == [
            (*tile, head)
            for first in range(0, heads, heads_in_l2)
            for tile in tiles
            for head in range(first, min(first + heads_in_l2, heads))
        ]
        assert looked_up(number * heads, *given).rows == 0


def walks(program, heads, window_left, rows, prefix, starts, tiles, work, num_splits):
    """What a program's role walks to, item after item, in a schedule of row tiles of 16 packed rows of a group of 2."""
    agenda = kernels_sm90.tile_scheduler
    language = SimpleNamespace(
        load=lambda pointer: pointer.value, minimum=min, maximum=max, program_id=lambda axis: program,
        where=lambda condition, yes, no: yes if condition else no,
    )  # fmt: skip
    apart = FunctionType(kernels_sm90.pack_gqa.split_packed_row.fn.__code__, {})
    known = {
        "gl": language,
        "HEADER_WORDS": agenda.HEADER_WORDS.value,
        "split_packed_row": apart,
        "WorkTile": agenda.WorkTile,
        "KvRange": agenda.KvRange,
    }
    known["row_tile_kv_range"] = FunctionType(agenda.row_tile_kv_range.fn.__code__, known)
    walk = FunctionType(agenda.next_split_tile.fn.__code__, known)
    constants = SimpleNamespace(WINDOW=window_left >= 0, BLOCK_M=16, BLOCK_N=32, OVERHEAD_TILES=common.OVERHEAD_TILES)
    inverse = ((1 << 23) + 1) // 2
    number = program // heads
    record = work[number] if number < num_splits else (0, 0, 0)
    place = (record[0], record[1], record[2], 0)
    words = [word for row in tiles for word in row]
    given = (Words(words), tiles[0][1], tiles[1][1], Words(prefix), Words(starts), heads, 2, inverse, window_left)
    found = []
    while True:
        item, span, place = walk(place, *given, constants)
        assert min(item + span) >= 0, "an item is read as a sum, which says whether it is there"
        if not item.rows:
            return found
        expected = (starts[item.request], rows[item.request], prefix[item.request])
        assert (item.q_begin, item.rows, item.prefix_len) == expected
        found.append((item.request, (item.row * 2 + item.head_offset) // 16, item.head, *span))


@pytest.mark.parametrize("window_left", [-1, 300])
@pytest.mark.parametrize("heads", [1, 3])
def test_split_row_tiles_follow_the_schedule(helpers, heads, window_left):
    """Every tile of keys that a row tile sees is one item's, for each head; what is not whole has its own place."""
    from draftmark_cuda_triton.launch import launches, operands

    chance, cut = random.Random(heads), set()
    tile, shape = (
        common.KernelConfig(16, 32, 4, 2, 2),
        operands.AttentionParams(heads, 2, 64, 16, 1.0, window_left=window_left),
    )
    for _ in range(20):
        count, num_splits = chance.randrange(1, 6), chance.randrange(2, 20)
        prefix = [chance.choice((0, 5, chance.randrange(4000))) for _ in range(count)]
        rows = [chance.choice((1, 8, chance.randrange(40))) for _ in range(count)]
        if chance.random() < 0.4:
            rows = [17 + n for n in range(count)]  # three row tiles each
        starts = [sum(rows[:n]) for n in range(count + 1)]
        if not starts[-1]:
            continue
        tensors = (torch.tensor(one, dtype=torch.int32, device=helpers.device) for one in (prefix, starts))
        table = torch.ones(count, 300, dtype=torch.int32, device=helpers.device)
        tiles = helpers.poison(2 + common.max_row_tiles(tile, 2, starts[-1], count), 2, dtype=torch.int32)
        slots, work = (
            helpers.poison(starts[-1], dtype=torch.int64),
            helpers.poison(2 * num_splits, 4, dtype=torch.int32),
        )
        launches.write_metadata_prefill(
            shape, tile, starts[-1], *tensors, table, slots, tiles, None, work, num_splits, num_splits * heads
        )  # fmt: skip
        if not tiles[1, 1]:
            continue
        cut.add(int(tiles[1, 1]))
        options = prefix, starts, tiles.tolist(), work.tolist(), num_splits
        items = [one for n in range((num_splits + 1) * heads) for one in walks(n, heads, window_left, rows, *options)]
        met, places = set(), [(head, where) for _, _, head, *_, where in items if where]
        for request, m, head, first, stop, where in items:
            own = {(request, m, head, key) for key in range(first, stop)}
            assert own and not own & met
            met |= own
            assert (where == 0) == (len([1 for one in items if one[:3] == (request, m, head)]) == 1)
        seen = tile_of_keys(rows, prefix, heads, window_left)
        assert met == seen
        assert len(set(places)) == len(places) and all(1 <= where <= 2 * num_splits for _, where in places)
    assert cut == {1, 3}


def tile_of_keys(rows, prefix, heads, window_left):
    """Request, row tile, head and tile of keys that its rows see one of."""
    found = set()
    for request, (count, before) in enumerate(zip(rows, prefix, strict=True)):
        for packed in range(2 * count):
            row = packed // 2
            low = 0 if window_left < 0 else max(before + row - window_left, 0)
            keys = range(low // 32, (before + row) // 32 + 1)
            found |= {(request, packed // 16, head, key) for head in range(heads) for key in keys}
    return found
