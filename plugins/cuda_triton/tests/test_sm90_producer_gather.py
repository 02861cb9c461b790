"""Tests of the gathering producer: its Gluon source runs here over NumPy, because Gluon has no interpreter."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftmark_cuda_triton.heuristics import sm90
from plugins.cuda_triton.tests.numpy_pipeline import make_numpy_pipeline

try:
    from draftmark_cuda_triton import kernels_sm90
except (ImportError, AttributeError):
    pytest.skip("this Triton has no Gluon as `kernels_sm90` uses it", allow_module_level=True)

ELEMENT = np.int16
POINTER = "pointer to ELEMENT"


class Value:
    """Models a Gluon tensor with NumPy. A pointer is an address in bytes, and its offsets count elements."""

    def __init__(self, data: Any, dtype: Any = None) -> None:
        self.data, self.dtype = np.asarray(data), dtype or np.asarray(data).dtype

    def to(self, dtype: Any) -> Value:
        """Return the value as another dtype."""
        return Value(self.data.astype(np.int64 if dtype == POINTER else dtype), dtype)

    def __getitem__(self, key: Any) -> Value:
        return Value(self.data[key], self.dtype)

    def _with(self, other: Any, operation: Any) -> Value:
        right = other.data if isinstance(other, Value) else other
        if self.dtype == POINTER:
            return Value(operation(self.data, right * np.dtype(ELEMENT).itemsize), POINTER)
        return Value(operation(self.data, right))

    def __add__(self, other: Any) -> Value:
        return self._with(other, np.add)

    def __sub__(self, other: Any) -> Value:
        return self._with(other, np.subtract)

    def __rsub__(self, other: Any) -> Value:
        return self._with(other, lambda a, b: b - a)

    def __mul__(self, other: Any) -> Value:
        return self._with(other, np.multiply)

    def __floordiv__(self, other: Any) -> Value:
        return self._with(other, lambda a, b: np.trunc(a / b).astype(a.dtype))  # a GPU's division rounds to zero

    def __mod__(self, other: Any) -> Value:
        return self._with(other, np.fmod)

    def __ge__(self, other: Any) -> Value:
        return self._with(other, np.greater_equal)

    def __lt__(self, other: Any) -> Value:
        return self._with(other, np.less)

    def __eq__(self, other: Any) -> Any:
        return self._with(other, np.equal)

    def __xor__(self, other: Any) -> Value:
        return self._with(other, np.bitwise_xor)

    def __and__(self, other: Any) -> Value:
        return self._with(other, np.bitwise_and)

    __radd__, __rmul__ = __add__, __mul__
    __hash__ = None  # type: ignore[assignment]

    def __index__(self) -> int:
        return int(self.data)


@dataclass
class Table:
    """Models a row of the page table; a read out of range fails."""

    entries: list[int]
    offset: Any = 0

    def __add__(self, offset: Value) -> Table:
        return Table(self.entries, offset.data)

    def read(self, mask: np.ndarray) -> np.ndarray:
        """Return the entries where the mask is set, else 0."""
        return np.array([self.entries[i] if m else 0 for i, m in zip(self.offset, mask, strict=True)])


@dataclass
class Model:
    """Models the part of Gluon that the producer uses, over one global memory.

    Attributes:
        memory: ``[elements]``, global memory.
        done: waits and arrivals at barriers, in order. A wait is ("wait", barrier, stage, phase). An arrival is
            (barrier, stage, increment_count).
    """

    memory: np.ndarray
    done: list[Any] = field(default_factory=list)

    def environment(self) -> dict[str, Any]:
        """Return the global names of the producer's functions."""
        gather, mask, pipeline = kernels_sm90.producer_gather, kernels_sm90.mask, kernels_sm90.pipeline
        language = SimpleNamespace(
            int64=np.int64, num_warps=lambda: 4, SliceLayout=lambda dim, of: of, multiple_of=lambda x, n: x,
            arange=lambda begin, end, layout: Value(np.arange(begin, end, dtype=np.int32)),
            convert_layout=lambda x, layout: x,
            load=lambda at, mask, other: Value(at.read(mask.data), np.int32),
            minimum=lambda a, b: Value(np.minimum(_plain(a), _plain(b))), static_range=range,
            where=lambda c, a, b: Value(np.where(_plain(c), _plain(a), _plain(b))),
            inline_asm_elementwise=self.multiply,
        )  # fmt: skip
        names: dict[str, Any] = {
            "gl": language, "cp_async": self.copy, "copy_layout": lambda *of: of, "page_id_layout": lambda *of: of,
            "mbarrier": SimpleNamespace(wait=lambda barrier, phase: self.done.append(("wait", *barrier, int(phase)))),
            "async_copy": SimpleNamespace(
                mbarrier_arrive=lambda barrier, increment_count: self.done.append((*barrier, increment_count))
            ),
        }  # fmt: skip
        names |= {
            one: getattr(kernels_sm90.config, one).fn for one in ("part_offset", "num_column_parts", "part_width")
        }
        for module, name in (
            *((gather, one) for one in ("load_page_ids", "loaded_positions", "distribute_page_ids", "add_offset_64")),
            *((gather, one) for one in ("copy_tile", "copy_tile_part", "gather_tiles")),
            (mask, "key_positions"), (pipeline, "advance"),
        ):  # fmt: skip
            names[name] = FunctionType(getattr(module, name).fn.__code__, names)
        return names

    def multiply(self, text: str, constraints: str, values: list[Any], **_: Any) -> Value:
        """Run the producer's only inline PTX, a multiply-add with a 64-bit result."""
        assert text.startswith("mad.wide.s32 $0, $1, $2, $3") and constraints == "=l,r,r,l"
        index, stride, base = values
        assert index.dtype != np.int64 and stride.dtype == np.int32
        return Value(index.data.astype(np.int64) * np.int64(stride.data) + base.data)

    def copy(self, place: np.ndarray, pointers: Value, mask: Value) -> None:
        """Run cp.async, 16 bytes a thread; masked copies write zeros."""
        at, there = pointers.data, np.broadcast_to(mask.data, place.shape)
        firsts = at.reshape(len(at), -1, 8)[:, :, 0]
        assert not (firsts[there.reshape(len(at), -1, 8)[:, :, 0]] % 16).any()
        place[:] = 0
        place[there] = self.memory[at[there] // 2]


def _plain(x: Any) -> Any:
    return x.data if isinstance(x, Value) else x


def gathered(
    make_numpy_pipeline: Callable[..., Any], page: int, block_n: int, dim: int, kv_len: int, first: int, head: int,
    layout: str, seed: int, kv_heads_per_tile: int = 1, first_key: int | None = None,
):  # fmt: skip
    """Gather the key tiles from `first` on of one request.

    Args:
        make_numpy_pipeline: fixture that creates the pipeline.
        page: tokens of a page.
        layout: "packed": a page of this tensor lies next to pages of four other tensors; "heads": heads come first.
        kv_heads_per_tile: adjacent KV heads in one tile, as columns.
        first_key: first key under a window; None without a window. Earlier columns of the page table are invalid.

    Returns:
        K and V of each tile; the expected rows of each tile; `Model.done`.
    """
    chance, heads, stages = random.Random(seed), 3 * kv_heads_per_tile, 3
    columns = -(-kv_len // page)
    ids = chance.sample(range(1, 4 * columns + 8), columns)
    pages, hidden = max(ids) + 1, first_key or 0
    ids = [-1 if number < hidden // page else one for number, one in enumerate(ids)]
    shape = {"packed": (pages, 5, page, heads, dim), "heads": (heads, pages, page, 1, dim)}[layout]
    memory = np.arange(np.prod(shape), dtype=np.int64).astype(ELEMENT)
    memory[memory == 0] = 1
    every = np.arange(memory.size).reshape(shape)
    cells = every[:, 2] if layout == "packed" else every[:, :, :, 0].transpose(1, 2, 0, 3)
    cells = cells if kv_heads_per_tile == 1 else cells.reshape(*cells.shape[:2], -1, kv_heads_per_tile * dim)
    strides = [int(cells.strides[i] // 8 * 2) for i in range(3)]
    at = Value(np.int64(2 * int(cells[0, 0, 0, 0])), POINTER)
    source = (at, *(Value(np.int32(s)) for s in strides))
    model = Model(memory)
    block_d, rest = sm90.split_head_dim(kv_heads_per_tile * dim)
    widths = [one for one in (block_d, rest) if one]
    k, v = ([[np.full((block_n, one), -7, ELEMENT) for _ in range(stages)] for one in widths] for _ in range(2))
    pipeline = make_numpy_pipeline(k, v)
    end = -(-kv_len // block_n)
    gather_tiles, tiles, stage, phase = model.environment()["gather_tiles"], [], Value(0), Value(0)
    constants = SimpleNamespace(
        PAGE_SIZE=page,
        BLOCK_N=block_n,
        KV_HEADS_PER_TILE=kv_heads_per_tile,
        HEAD_DIM=dim,
        BLOCK_D=block_d,
        BLOCK_D_REST=rest,
        STAGES=stages,
        WINDOW=first_key is not None,
    )
    for tile in range(first, end):
        stage, phase = gather_tiles(
            source, source, pipeline, stage, phase, Table(ids), Value(np.int32(head)), tile, tile + 1, hidden,
            kv_len, constants,
        )  # fmt: skip
        tiles.append([np.hstack([one[(tile - first) % stages] for one in half]) for half in (k, v)])
    expected = []
    for tile in range(first, end):
        rows = np.zeros((block_n, sum(widths)), ELEMENT)
        keys = range(tile * block_n, min(kv_len, (tile + 1) * block_n))
        for row, key in zip(range(block_n - len(keys), block_n), keys, strict=True):
            if key >= hidden or (first_key is not None and page % block_n == 0):
                rows[row, : kv_heads_per_tile * dim] = memory[cells[ids[key // page], key % page, head]]
        expected.append(rows)
    return tiles, expected, model.done


@pytest.mark.parametrize("layout", ["packed", "heads"])
@pytest.mark.parametrize("page", [1, 2, 3, 4, 5, 12, 20])
def test_gathered_tile_equals_a_tma_tile(page, layout):
    """For any page size a tile holds keys in order, the last key in its last row, and zeros before the first key."""
    chance = random.Random(page)
    for case in range(12):
        block_n, dim = chance.choice((64, 128)), chance.choice((64, 72, 80, 96, 120, 128, 160, 192))
        kv_len = chance.choice((1, block_n - 1, block_n, block_n + 1, chance.randrange(1, 4 * block_n)))
        first = chance.randrange(-(-kv_len // block_n))
        options = (page, block_n, dim, kv_len, first, chance.randrange(3), layout, case)
        tiles, expected, _ = gathered(make_numpy_pipeline, *options)
        for (k, v), rows in zip(tiles, expected, strict=True):
            assert np.array_equal(k, rows) and np.array_equal(v, rows), options


@pytest.mark.parametrize("page", [1, 5, 16, 48, 64, 128])
def test_gathered_tile_is_zero_left_of_the_window(page):
    """Keys left of the window are zeros if their page may be another request's; page ids of -1 are not read."""
    chance = random.Random(page)
    for case in range(12):
        block_n, kv_len = chance.choice((64, 128)), chance.randrange(100, 500)
        first_key = chance.randrange(kv_len)
        options = (page, block_n, 64, kv_len, first_key // block_n, chance.randrange(3), "packed", case)
        tiles, expected, _ = gathered(make_numpy_pipeline, *options, first_key=first_key)
        for (k, v), rows in zip(tiles, expected, strict=True):
            assert np.array_equal(k, rows) and np.array_equal(v, rows), options


@pytest.mark.parametrize("page", [1, 5, 16, 64])
@pytest.mark.parametrize("dim", [48, 64, 80, 96, 120])
def test_tile_holds_two_adjacent_heads(page, dim):
    """A tile holds the elements of both heads, and zeros after them."""
    for kv_len in (1, 64, 130):
        for head in range(3):
            tiles, expected, _ = gathered(
                make_numpy_pipeline, page, 64, dim, kv_len, 0, head, "packed", kv_len, kv_heads_per_tile=2
            )
            for (k, v), rows in zip(tiles, expected, strict=True):
                assert np.array_equal(k, rows) and np.array_equal(v, rows)


def test_stage_barriers_are_used_in_order():
    """Each stage waits for empty K, fills K, waits for empty V and fills V; the phase flips after the last stage."""
    _, _, done = gathered(make_numpy_pipeline, 4, 64, 64, 300, 0, 0, "packed", 0)
    expected = []
    for tile in range(5):
        stage, turn = tile % 3, tile // 3
        for what in ("k", "v"):
            expected += [("wait", f"{what} empty", stage, 1 - turn % 2), (what, stage, False)]
    assert done == expected


@pytest.mark.parametrize("block_d", [64, 128, 256])
@pytest.mark.parametrize("rows", [64, 128])
def test_warp_loads_page_ids_of_the_rows_it_copies(rows, block_d):
    """A warp loads the page ids of exactly the rows that it copies, so page ids are shuffled within a warp only."""
    gather = kernels_sm90.producer_gather
    ids, copies = (
        gather.page_id_layout.fn(rows, block_d, 4),
        gather.copy_layout.fn(SimpleNamespace(BLOCK_D=block_d), 0, 4),
    )
    rows_per_warp, threads_per_row = copies.threads_per_warp
    assert (copies.size_per_thread, rows_per_warp * threads_per_row, threads_per_row * 8) == ([1, 8], 32, block_d)
    assert len(ids.lane_bases) == 5
    for warp in range(4):
        lanes = {sum(basis[0] * (lane >> i & 1) for i, basis in enumerate(ids.lane_bases)) for lane in range(32)}
        mine = {row + sum(basis[0] * (warp >> i & 1) for i, basis in enumerate(ids.warp_bases)) for row in lanes}
        assert mine == {row for row in range(rows) if row // rows_per_warp % 4 == warp}


@pytest.mark.parametrize(("block_d", "rest"), [(64, 16), (64, 32), (128, 16), (128, 32), (128, 64)])
@pytest.mark.parametrize("rows", [64, 128])
def test_warp_copies_all_column_parts_of_its_rows(rows, block_d, rest):
    """A warp copies every cell of its rows once, 16 bytes a thread, with adjacent threads in one row."""
    gather, cells = kernels_sm90.producer_gather, np.zeros((rows, rest), int)
    layout = gather.copy_layout.fn(SimpleNamespace(BLOCK_N=rows, BLOCK_D=block_d, BLOCK_D_REST=rest), 1, 4)
    assert layout.reg_bases[:3] == [[0, 1], [0, 2], [0, 4]] and len(layout.lane_bases) == 5
    assert layout.lane_bases[: (rest // 8).bit_length() - 1] == [
        [0, 8 << i] for i in range((rest // 8).bit_length() - 1)
    ]
    for at in range(2 ** len(layout.reg_bases) * 32 * 4):
        bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
        row, column = (sum(basis[i] * (at >> bit & 1) for bit, basis in enumerate(bases)) for i in (0, 1))
        assert row // (256 // block_d) % 4 == at >> (len(bases) - 2)
        cells[row, column] += 1
    assert (cells == 1).all()


def test_every_copying_thread_arrives_at_the_barrier():
    """A full barrier expects 128 arrivals, one from each gathering thread (`cp.async.mbarrier.arrive.noinc`)."""
    gather = kernels_sm90.producer_gather
    assert gather.GATHER_THREADS.value == 32 * gather.GATHER_WARPS.value == 128
