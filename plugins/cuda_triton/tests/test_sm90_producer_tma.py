"""Tests of the TMA producer: its Gluon source runs here over NumPy, because Gluon has no interpreter."""

from __future__ import annotations

from itertools import product
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from draftmark import AttentionShape, DeviceProfile
from draftmark_cuda_triton.heuristics import common, select, sm90
from draftmark_cuda_triton.launch import tma
from draftmark_testing.pairs import quick
from plugins.cuda_triton.tests.numpy_pipeline import make_numpy_pipeline

try:
    from draftmark_cuda_triton import kernels_sm90
except (ImportError, AttributeError):
    pytest.skip("this Triton has no Gluon as `kernels_sm90` uses it", allow_module_level=True)

HOPPER = DeviceProfile("cuda", 90, 132)
STAGES = 2


class Source:
    """Models a TMA descriptor as the kernel receives it, over NumPy."""

    def __init__(self, descriptor: Any) -> None:
        self.block_shape, self.layout = descriptor.block_shape, descriptor.layout
        self.dtype = SimpleNamespace(primitive_bitwidth=8 * descriptor.base.element_size())
        self.cells = torch.as_strided(descriptor.base, descriptor.shape, descriptor.strides).numpy()

    def box(self, at: list[int]) -> np.ndarray:
        """Return the box at these coordinates, with zeros outside the tensor."""
        found = np.zeros(self.block_shape, self.cells.dtype)
        for inside in product(*map(range, self.block_shape[:-1])):
            here = [a + i for a, i in zip(at, inside, strict=False)]
            if all(0 <= one < size for one, size in zip(here, self.cells.shape, strict=False)):
                row = self.cells[tuple(here)][at[-1] : at[-1] + self.block_shape[-1]]
                found[inside][: len(row)] = row
        return found


class Copies:
    """Models the part of Gluon that the producer uses.

    Attributes:
        bytes: full barrier → bytes that it expects and has not received.
    """

    def __init__(self) -> None:
        self.bytes: dict[Any, int] = {}

    def environment(self) -> dict[str, Any]:
        """Return the global names of the producer's functions."""
        config, producer, pipeline = kernels_sm90.config, kernels_sm90.producer_tma, kernels_sm90.pipeline
        language = SimpleNamespace(
            load=lambda at, mask=True, other=None: at.read() if mask else other,
            minimum=min, maximum=max, static_range=range, where=lambda condition, a, b: a if condition else b,
        )  # fmt: skip
        names: dict[str, Any] = {
            "gl": language, "range": range, "tma_load": self.load, "LOAD_V": config.LOAD_V.value,
            "reinterpret": lambda smem, dtype, shape, layout: SimpleNamespace(index=smem.reshape(shape).__getitem__),
            "mbarrier": SimpleNamespace(wait=lambda *_: None, expect=self.expect),
            **{
                one: getattr(producer, one).fn
                for one in ("box_keys", "tile_bytes", "unrolls_boxes", "boxes_per_batch")
            },
            **{one: getattr(config, one).fn for one in ("part_offset", "num_column_parts", "part_width")},
        }  # fmt: skip
        for module, name in (
            *((producer, one) for one in ("load_tiles", "load_full_tiles", "load_partial_tiles", "box_views")),
            (producer, "load_page_id"),
            *((producer, one) for one in ("issue_box", "issue_last_boxes", "issue_column_boxes", "issue_part_boxes")),
            (pipeline, "advance"),
        ):
            names[name] = FunctionType(getattr(module, name).fn.__code__, names)
        return names

    def expect(self, barrier: Any, count: int) -> None:
        """Expect `count` bytes at a barrier that has received all bytes of its previous tile."""
        assert self.bytes.get(barrier, 0) == 0
        self.bytes[barrier] = count

    def load(self, source: Source, at: list[int], barrier: Any, smem: np.ndarray, pred: bool = True) -> None:
        """Run a TMA load, which counts the bytes of the whole box even if a part lies outside the tensor."""
        if pred:
            assert smem.shape == tuple(source.block_shape)
            smem[...] = source.box([int(one) for one in at])
            self.bytes[barrier] -= smem.nbytes


class Table:
    """Models a row of the page table; a read out of range fails."""

    def __init__(self, entries: list[int], at: int = 0) -> None:
        self.entries, self.at = entries, at

    def __add__(self, offset: int) -> Table:
        return Table(self.entries, self.at + offset)

    def read(self) -> int:
        """Return the entry."""
        return self.entries[self.at]


def as_read(smem: np.ndarray, keys: int, dim: int, full_head: bool) -> np.ndarray:
    """Return a tile as wgmma reads it, ``[keys, dim]``; this model omits the swizzle.

    Args:
        full_head: full-head boxes: each box holds all 256 bytes of a head.
    """
    width = min(64, dim)
    if full_head:
        return smem.reshape(keys // 8, dim // width, 8, width).transpose(0, 2, 1, 3).reshape(keys, dim)
    return smem.reshape(dim // width, keys, width).transpose(1, 0, 2).reshape(keys, dim)


SHAPES = [  # page, head dimension, heads of a copy, whether these heads are adjacent in memory
    (16, 128, 1, True), (64, 128, 1, True), (8, 128, 1, True), (128, 128, 1, True), (48, 128, 1, True),
    (16, 64, 2, True), (16, 128, 1, False), (64, 128, 1, False), (16, 96, 1, True), (32, 256, 1, True),
    (8, 64, 1, True), (16, 80, 1, True), (64, 160, 1, False), (32, 96, 2, True), (16, 72, 2, True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "num_consumer_wgs", "tile"), quick(product(SHAPES, [1, 2, 3], [(64, False), (128, False), (64, True)]))
)
def test_tile_holds_the_keys_its_mask_expects(shape, num_consumer_wgs, tile):
    """A tile holds each key in the row that the mask assigns to it, and nothing after the request's last key.

    Pages left of the window, which the request does not own any more, are not read.
    """
    (page, dim, heads, adjacent_heads), (block_n, windowed) = shape, tile
    # Slots after the last key and pages left of the window are NaN, so a read of them would show in the tile.
    chance = np.random.default_rng(page * dim + block_n)
    kv_heads = 4
    attention = AttentionShape(4 * kv_heads, kv_heads, dim, page, "float16", "float16")
    config = common.KernelConfig(
        64 * num_consumer_wgs,
        block_n,
        4 * num_consumer_wgs,
        STAGES,
        1,
        common.Kernel.SM90,
        num_consumer_wgs,
        kv_heads_per_tile=heads,
    )
    config = select.adapt_to_cache(attention, HOPPER, config, True, True, adjacent_heads)
    assert config.box_full_head is (adjacent_heads and heads * dim == 128)
    for kv_len in (1, 7, 9, block_n - 1, block_n, block_n + 17, 3 * block_n - 9):
        columns = -(-kv_len // page)
        ids = [int(one) for one in chance.permutation(columns + 3)[:columns]]
        # adjacent_heads: [pages, token, K/V, head, dim]; otherwise [pages, head, K/V, token, dim].
        sizes = (columns + 3, page, 2, kv_heads, dim) if adjacent_heads else (columns + 3, kv_heads, 2, page, dim)
        pool = torch.tensor(chance.integers(1, 2000, sizes), dtype=torch.float16)
        k, v = (pool[:, :, one] if adjacent_heads else pool[:, :, one].transpose(1, 2) for one in (0, 1))
        used = np.zeros((columns + 3, page), bool)
        first_key = kv_len // 2 if windowed else 0
        hidden = first_key // page
        for number, one in enumerate(ids):
            used[one, : kv_len - number * page] = number >= hidden
        for one in (k, v):
            one[torch.from_numpy(~used)] = float("nan")
        head = int(chance.integers(0, kv_heads // heads))
        for role, cache in ((0, k), (1, v)):
            described = tma.make_descriptors(tma.merge_heads(cache, config.kv_heads_per_tile), page, config)
            source = tuple(None if one is None else Source(one) for one in described)
            box = tma.SWIZZLE_ROWS if config.box_full_head else tma.box_keys(page, config)
            widths = [one for one in sm90.split_head_dim(heads * dim) if one]
            stages = [[np.full(block_n * width, -7, np.float16) for _ in range(STAGES)] for width in widths]
            pipeline = make_numpy_pipeline(stages, stages)
            copies = Copies()
            first, rest = sm90.split_head_dim(heads * dim)
            constants = SimpleNamespace(
                PAGE_SIZE=page,
                BLOCK_N=block_n,
                BLOCK_D=first,
                BLOCK_D_REST=rest,
                BOX_KEYS=box,
                FP8_STAGES=STAGES,
                NUM_CONSUMER_WGS=num_consumer_wgs,
                WINDOW=windowed,
            )
            load_tiles = copies.environment()["load_tiles"]
            count = -(-kv_len // block_n)
            for number in range(first_key // block_n, count):
                if (number - first_key // block_n) % STAGES == 0:
                    load_tiles(
                        source, pipeline, number % STAGES, 0, Table(ids), head, number, min(number + STAGES, count),
                        first_key, kv_len, columns + 3, role, constants,
                    )  # fmt: skip
                assert set(copies.bytes.values()) == {0}
                parts = zip(stages, widths, strict=True)
                got = np.hstack(
                    [as_read(one[number % STAGES], block_n, width, config.box_full_head) for one, width in parts]
                )
                assert not np.isnan(got).any()
                column = np.arange(block_n)
                start = number * block_n + column // box * box
                position = start + column % box - box + np.minimum(kv_len - start, box)
                for at in column[position >= np.maximum(start, first_key)]:
                    token = cache[ids[position[at] // page], position[at] % page]
                    wanted = token[head * heads : (head + 1) * heads].flatten().numpy()
                    assert np.array_equal(got[at, : heads * dim], wanted)
                    assert not got[at, heads * dim :].any()


@pytest.mark.parametrize(("keys", "dim"), [(64, 128), (128, 128), (64, 256)])
def test_wgmma_reads_full_heads_where_tma_writes_them(keys, dim):
    """wgmma finds each 16-byte piece c of row r at c xor r, where TMA's 128-byte swizzle of 8 rows has written it."""
    layout = kernels_sm90.pipeline.kv_tile_layout.fn(keys, dim, None, True)
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
