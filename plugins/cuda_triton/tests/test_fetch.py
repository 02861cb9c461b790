"""What the copy engine is asked for, and where it is to lie, by the role's own source: Gluon has no interpreter."""

from __future__ import annotations

from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftmark import AttentionShape, DeviceProfile
from draftmark_cuda_triton import boxes, tiling

pytestmark = pytest.mark.skipif(not boxes.available(), reason="this Triton has no Gluon as `hopper` uses it")

HOPPER = DeviceProfile("cuda", 90, 132)
STAGES = 2


class Source:
    """A descriptor as the kernel sees it."""

    def __init__(self, descriptor: Any) -> None:
        self.block_shape, self.layout = descriptor.block_shape, descriptor.layout
        self.dtype = SimpleNamespace(primitive_bitwidth=8 * descriptor.base.element_size())
        self.cells = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides).numpy()

    def box(self, at: list[int]) -> np.ndarray:
        """The box at some coordinates, with zeros outside of the tensor."""
        found = np.zeros(self.block_shape, self.cells.dtype)
        for inside in product(*map(range, self.block_shape[:-1])):
            here = [a + i for a, i in zip(at, inside, strict=False)]
            if all(0 <= one < size for one, size in zip(here, self.cells.shape, strict=False)):
                row = self.cells[tuple(here)][at[-1] : at[-1] + self.block_shape[-1]]
                found[inside][: len(row)] = row
        return found


class Copies:
    """The language as far as the role uses it.

    Attributes:
        bytes: that each barrier was told of, less those that came.
    """

    def __init__(self) -> None:
        self.bytes: dict[Any, int] = {}

    def environment(self) -> dict[str, Any]:
        """What the role's functions find under their global names."""
        fetch, ring = boxes.hopper().fetch, boxes.hopper().ring
        language = SimpleNamespace(
            load=lambda at, mask=True, other=None: at.read() if mask else other,
            minimum=min, maximum=max, static_range=range, where=lambda condition, a, b: a if condition else b,
        )  # fmt: skip
        names: dict[str, Any] = {
            "gl": language, "range": range, "async_load": self.load, "VALUES": fetch.VALUES.value,
            "reinterpret": lambda room, dtype, shape, layout: SimpleNamespace(index=room.reshape(shape).__getitem__),
            "mbarrier": SimpleNamespace(wait=lambda *_: None, expect=self.expect),
            **{name: getattr(fetch, name).fn for name in ("keys_of", "bytes_of", "unrolls", "at_once")},
            **{name: getattr(boxes.hopper().constants, name).fn for name in ("first_of", "parts_of", "width_of")},
        }  # fmt: skip
        for module, name in (
            *((fetch, one) for one in ("fetch_tiles", "fetch_full", "fetch_few", "rooms_of_heads")),
            *((fetch, one) for one in ("ask_for_box", "ask_for_rest", "ask_for_columns", "ask_for_part")),
            (ring, "next_slot"),
        ):
            names[name] = FunctionType(getattr(module, name).fn.__code__, names)
        return names

    def expect(self, barrier: Any, count: int) -> None:
        """So many bytes will come, and what was told before has come."""
        assert self.bytes.get(barrier, 0) == 0
        self.bytes[barrier] = count

    def load(self, source: Source, at: list[int], barrier: Any, room: np.ndarray, pred: bool = True) -> None:
        """A copy, which counts whole boxes whatever lies in the tensor."""
        if pred:
            assert room.shape == tuple(source.block_shape)
            room[...] = source.box([int(one) for one in at])
            self.bytes[barrier] -= room.nbytes


class Table:
    """A row of the page table; reading where nothing is written fails."""

    def __init__(self, entries: list[int], at: int = 0) -> None:
        self.entries, self.at = entries, at

    def __add__(self, offset: int) -> Table:
        return Table(self.entries, self.at + offset)

    def read(self) -> int:
        """The entry."""
        return self.entries[self.at]


def as_read(room: np.ndarray, keys: int, dim: int, whole: bool) -> np.ndarray:
    """A tile as a product reads it, ``[keys, dim]``; swizzled by none, as nothing here is."""
    width = min(64, dim)
    if whole:
        return room.reshape(keys // 8, dim // width, 8, width).transpose(0, 2, 1, 3).reshape(keys, dim)
    return room.reshape(dim // width, keys, width).transpose(1, 0, 2).reshape(keys, dim)


@pytest.mark.parametrize(("page", "dim", "heads", "beside"), [
    (16, 128, 1, True), (64, 128, 1, True), (8, 128, 1, True), (128, 128, 1, True), (48, 128, 1, True),
    (16, 64, 2, True), (16, 128, 1, False), (64, 128, 1, False), (16, 96, 1, True), (32, 256, 1, True),
    (8, 64, 1, True), (16, 80, 1, True), (64, 160, 1, False), (32, 96, 2, True), (16, 72, 2, True),
])  # fmt: skip
@pytest.mark.parametrize("members", [1, 2, 3])
@pytest.mark.parametrize("block_n", [64, 128])
def test_a_tile_has_the_keys_that_its_masks_say_it_has(ring_of, page, dim, heads, beside, block_n, members):
    """Each at its place, of K's and V's own pages; nothing that lies behind the last key of a request, which is NaN.
    All bytes that a barrier is told of come.
    """
    chance = np.random.default_rng(page * dim + block_n)
    kv_heads = 4
    attention = AttentionShape(4 * kv_heads, kv_heads, dim, page, "float16", "float16")
    tile = tiling.Tile(64 * members, block_n, 4 * members, STAGES, 1, members=members, heads=heads)
    tile = tiling.for_cache(attention, HOPPER, tile, True, True, beside)
    assert tile.whole is (beside and heads * dim == 128)
    for kv_len in (1, 7, 9, block_n - 1, block_n, block_n + 17, 3 * block_n - 9):
        columns = -(-kv_len // page)
        ids = [int(one) for one in chance.permutation(columns + 3)[:columns]]
        # K and V of a page side by side, or a head's tokens.
        sizes = (columns + 3, page, 2, kv_heads, dim) if beside else (columns + 3, kv_heads, 2, page, dim)
        pool = torch.tensor(chance.integers(1, 2000, sizes), dtype=torch.float16)
        k, v = (pool[:, :, one] if beside else pool[:, :, one].transpose(1, 2) for one in (0, 1))
        used = np.zeros((columns + 3, page), bool)
        for number, one in enumerate(ids):
            used[one, : kv_len - number * page] = True
        for one in (k, v):
            one[torch.from_numpy(~used)] = float("nan")
        head = int(chance.integers(0, kv_heads // heads))
        for what, cache in ((0, k), (1, v)):
            described = boxes.describe(boxes.beside(cache, tile.heads), page, tile)
            source = tuple(None if one is None else Source(one) for one in described)
            box = boxes.SWIZZLED_ROWS if tile.whole else boxes.box(page, tile)
            widths = [one for one in tiling.columns(heads * dim) if one]
            rooms = [[np.full(block_n * width, -7, np.float16) for _ in range(STAGES)] for width in widths]
            ring = ring_of(rooms, rooms)
            copies = Copies()
            first, rest = tiling.columns(heads * dim)
            constants = SimpleNamespace(
                PAGE=page, BLOCK_N=block_n, BLOCK_D=first, REST=rest, BOX=box, DEPTH=STAGES, MEMBERS=members
            )
            fetch = copies.environment()["fetch_tiles"]
            count = -(-kv_len // block_n)
            for number in range(count):
                if number % STAGES == 0:
                    fetch(
                        source, ring, 0, 0, Table(ids), head, number, min(number + STAGES, count), kv_len, columns + 3,
                        what, constants,
                    )  # fmt: skip
                assert set(copies.bytes.values()) == {0}
                parts = zip(rooms, widths, strict=True)
                got = np.hstack([as_read(one[number % STAGES], block_n, width, tile.whole) for one, width in parts])
                assert not np.isnan(got).any()
                column = np.arange(block_n)
                start = number * block_n + column // box * box
                position = start + column % box - box + np.minimum(kv_len - start, box)
                for at in column[position >= start]:
                    token = cache[ids[position[at] // page], position[at] % page]
                    wanted = token[head * heads : (head + 1) * heads].flatten().numpy()
                    assert np.array_equal(got[at, : heads * dim], wanted)
                    assert not got[at, heads * dim :].any()


@pytest.mark.parametrize(("keys", "dim"), [(64, 128), (128, 128), (64, 256)])
def test_a_product_reads_whole_heads_where_boxes_put_them(keys, dim):
    """The copy engine swizzles 8 rows of 128 bytes: the 16-byte piece at c of row r lies at c xor r."""
    layout = boxes.hopper().ring.tile_layout.fn(keys, dim, None, True)
    parts = dim // 64
    for offset in range(0, keys * dim, 3):
        row, column = 0, 0
        for bit, (down, right) in enumerate(layout.offset_bases):
            if offset >> bit & 1:
                row, column = row ^ down, column ^ right
        block, inside = divmod(offset, 8 * 64)
        own, piece = inside // 64, inside % 64 // 8
        assert row == block // parts * 8 + own
        assert column == block % parts * 64 + (piece ^ own) * 8 + offset % 8
