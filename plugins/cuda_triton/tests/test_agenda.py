"""Who takes which row tile on Hopper, by the agenda's own source over integers: Gluon has no interpreter."""

from __future__ import annotations

import random
from types import FunctionType, SimpleNamespace

import pytest

from draftmark_cuda_triton import boxes, tiling

pytestmark = pytest.mark.skipif(not boxes.available(), reason="this Triton has no Gluon as `hopper` uses it")


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

    agenda = boxes.hopper().agenda
    language = SimpleNamespace(
        load=lambda pointer: pointer.value, store=lambda pointer, word: setattr(pointer, "value", word),
        atomic_add=add, minimum=min, num_programs=lambda axis: programs,
    )  # fmt: skip
    return FunctionType(getattr(agenda, name).fn.__code__, {"gl": language, "HEADER": agenda.HEADER.value, "max": max})


def place_of(item, group):
    """Request, row tile of 128 packed rows, and head of what was looked up: a tile may begin inside a row's heads."""
    request, head, row, skipped, *_ = item
    assert 0 <= skipped < group
    assert (row * group + skipped) % 128 == 0
    return request, (row * group + skipped) // 128, head


def test_the_header_is_the_rows_before_the_first_tile():
    """In words here, in rows of two where buffers are sized."""
    assert boxes.hopper().agenda.HEADER.value == 2 * tiling.AGENDA_ROWS


@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize(
    ("heads", "together"), [(1, 1), (8, 8), (8, 4), (8, 3), (10, 4), (5, 1), (3, 2)], ids=lambda value: str(value)
)
def test_every_row_tile_of_every_head_is_taken_once(programs, heads, together):
    """In layer after layer, whoever is free first; by heads side by side, then the next ones. Tiles of requests without
    rows are none, and a program that finds nothing ends.
    """
    take, looked_up = of_agenda("take", programs), of_agenda("looked_up", programs)
    chance = random.Random(100 * heads + 10 * together + programs)
    for number, group in ((0, 1), (1, 7), (7, 4), (40, 12)):
        rows = [chance.randrange(1, 300) for _ in range(3)]
        prefix, starts = [chance.randrange(100) for _ in rows], [0]
        for count in rows:
            starts.append(starts[-1] + count)
        tiles = [(chance.randrange(3), chance.randrange(9)) for _ in range(number)]
        # What is behind the row tiles is never read as one.
        agenda = [0, number, together, 0, *(word for tile in tiles for word in tile), -1, -1]
        given = (Words(agenda), number, together, Words(prefix), Words(starts), heads, group, 128)
        for _ in range(2):
            found = []
            free = [(program, looked_up(program, *given)) for program in range(programs)]
            while free:
                program, one = free.pop(chance.randrange(len(free)))
                if one[5]:
                    found.append(one)
                    free.append((program, looked_up(take(Words(agenda), number * heads), *given)))
            assert agenda[0] == 0, "the next layer takes from the start"
            assert sorted(place_of(one, group) for one in found) == sorted(
                (*tile, head) for tile in tiles for head in range(heads)
            )
            assert all(
                (begin, count, before) == (starts[request], rows[request], prefix[request])
                for request, _, _, _, begin, count, before in found
            )
        order = [place_of(looked_up(item, *given), group) for item in range(number * heads)]
        assert order == [
            (*tile, head)
            for first in range(0, heads, together)
            for tile in tiles
            for head in range(first, min(first + together, heads))
        ]
        assert looked_up(number * heads, *given)[5] == 0
