"""Launches: tensors in, grids and constants worked out, one kernel each (attend of a uniform batch: two).

Host work is integer arithmetic on shapes that a capture freezes; nothing here reads the device or allocates.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from draftmark import DTYPE_BYTES, Geometry

from . import boxes, gathering
from .flavours import compiled_or_interpreted
from .starting import dependent, start
from .tiling import (
    CUT_TILES,
    INTERPRETED_KEYS,
    ITEM_COST,
    LEAST_SHARE,
    WIDE_PAGE,
    Tile,
    cut_costs,
    next_power_of_two,
    ragged_tiles,
    row_tiles,
)

LOG2E = 1.4426950408889634
SCHEDULE_CELLS = 8192
"""Cells of the (worker, request) comparison that one program of write_metadata holds in registers."""
RAGGED_CELLS = 2048
"""Of the ragged (row or row tile, request) comparisons, which are several."""
CUT_SIZES = (32, 2 * CUT_TILES)
"""Row tiles that a program which cuts them holds in registers; of each request's a last one may be begun."""
MERGE_CELLS = 4096
"""fp32 values that one step of a merge program, a warp, holds in registers."""
WIDEN_CELLS = 8192
"""Elements of K, and of V, that one program of `widen` has in registers."""
WIDEN_REQS = 64
"""Requests before its own that it looks at in one step."""
L2_BYTES = 32 << 20
"""What K and V may take of L2 (50 MB on Hopper) that programs beside each other read."""
CAUSAL, TREE, BLOCK = 0, 1, 2
"""Tails as the kernels name them; see `kernels.tile`."""


@dataclass(frozen=True)
class Attention:
    """What one geometry fixes for every launch.

    Attributes:
        num_kv_heads, group, head_dim, page_size: the attention shape.
        scale: factor on q·k. cap: logits soft cap, 0 for none. window_left: -1 for none, or none that hides anything.
        pdl: attention of few rows and its merge are launched as programmatic dependents (sm_90 and newer): a grid takes
            its place while the one before it runs, and waits for that one's stores.
        heads: KV heads of the cache that are one of `num_kv_heads`; `group` is then that of all of them (`beside`).
    """

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    scale: float
    cap: float = 0.0
    window_left: int = -1
    pdl: bool = False
    room: int = 1 << 30
    heads: int = 1

    @classmethod
    def of(cls, geometry: Geometry, on_gpu: bool) -> Attention:
        """What `geometry` fixes. It may describe a GPU while the tensors are on the CPU, interpreted."""
        a = geometry.attention
        # Where all that a page table can name fits into a window, it hides nothing, and its code is not compiled in.
        hides = a.window_left < geometry.max_pages_per_req * a.page_size - 1
        return cls(
            num_kv_heads=a.num_kv_heads,
            group=a.group_size,
            head_dim=a.head_dim,
            page_size=a.page_size,
            scale=a.softmax_scale if a.softmax_scale is not None else a.head_dim**-0.5,
            cap=a.logits_soft_cap,
            window_left=a.window_left if hides else -1,
            pdl=on_gpu and geometry.device.arch >= 90,
            room=L2_BYTES // (2 * a.head_dim * DTYPE_BYTES[a.kv_dtype]),
        )

    def beside(self, heads: int) -> Attention:
        """The same attention, of KV heads that are each as many of these, side by side."""
        return replace(self, num_kv_heads=self.num_kv_heads // heads, group=self.group * heads, heads=heads)

    @property
    def block_d(self) -> int:
        """Columns of a tile: head_dim padded to a power of two; the padding is masked, never stored."""
        return max(16, next_power_of_two(self.heads * self.head_dim))

    @property
    def window(self) -> bool:
        """Whether a window applies."""
        return self.window_left >= 0


@dataclass(frozen=True)
class Extent:
    """The extent of a batch of few rows a request.

    Attributes:
        num_reqs: R. q_len, tail_len: rows and tail slots of each request; of a ragged batch, the most of any.
        num_rows: rows of the batch, padding included.
        ragged: the device says how many rows each request has.
    """

    num_reqs: int
    q_len: int
    tail_len: int
    num_rows: int
    ragged: bool = False


class Cut(NamedTuple):
    """How row tiles of EXTEND are cut by their keys, where the schedule finds that faster.

    Attributes:
        pieces: of the line of row tiles of each KV head, 2 or more. programs: that the device holds at a time.
        work: int32 ``[2 · pieces, 4]``; see `schedule.write_ragged`.
        partial_out, partial_lse: float32 ``[2 · pieces · KV heads · block_m, head_dim]``, and without head_dim.
    """

    pieces: int
    programs: int
    work: torch.Tensor
    partial_out: torch.Tensor
    partial_lse: torch.Tensor


def write_metadata(
    shape: Attention,
    tile: Tile,
    extent: Extent,
    pieces: int,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    work: torch.Tensor,
    q_indptr: torch.Tensor | None = None,
    given_slots: torch.Tensor | None = None,
) -> None:
    """Slots and work records of a batch of few rows a request; see `schedule.write_uniform`.

    Args:
        q_indptr: of a ragged batch. given_slots: the engine's, if it brings them.
    """
    block_r = max(16, next_power_of_two(extent.num_reqs))
    block_pieces = max(1, min(32, SCHEDULE_CELLS // block_r))
    rows = extent.num_rows
    # A ragged row looks for its request among all of them.
    block_rows = max(1, min(256, SCHEDULE_CELLS // block_r)) if extent.ragged else 256
    grid = (max(triton.cdiv(rows, block_rows), triton.cdiv(pieces, block_pieces)),)
    start(
        compiled_or_interpreted(work).schedule.write_uniform, grid,
        prefix_lens, _or(q_indptr, prefix_lens), page_table, given_slots, slot_mapping, work, extent.num_reqs, rows,
        extent.q_len, extent.tail_len, pieces, page_table.stride(0), shape.window_left, PAGE=shape.page_size,
        BLOCK_N=tile.block_n, WINDOW=shape.window, RAGGED=extent.ragged, GIVEN=given_slots is not None,
        ITEM_COST=ITEM_COST, BLOCK_R=block_r, BLOCK_ROWS=block_rows, BLOCK_PIECES=block_pieces,
    )  # fmt: skip


def write_metadata_ragged(
    shape: Attention,
    tile: Tile,
    num_rows: int,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    tiles: torch.Tensor,
    given_slots: torch.Tensor | None = None,
    work: torch.Tensor | None = None,
    pieces: int = 1,
    programs: int = 1,
) -> None:
    """Slots and row tiles of a ragged batch; see `schedule.write_ragged`.

    Args:
        work, pieces: where row tiles may be cut, the schedule, and into how many pieces a KV head. programs: that the
            device holds at a time.
    """
    num_reqs = prefix_lens.shape[0]
    num_tiles = ragged_tiles(tile, shape.group, num_rows, num_reqs)
    block_r = max(16, next_power_of_two(num_reqs))
    block = max(1, min(256, RAGGED_CELLS // block_r))
    # All row tiles stand in a vector of each program that cuts them; of two sizes, for each is compiled apart.
    block_tiles = next((size for size in CUT_SIZES if num_tiles <= size), CUT_SIZES[-1]) if pieces > 1 else 1
    block_pieces = max(1, min(32, SCHEDULE_CELLS // block_tiles))
    grid = (max(triton.cdiv(max(num_rows, num_tiles), block), triton.cdiv(pieces, block_pieces)),)
    start(
        compiled_or_interpreted(tiles).schedule.write_ragged, grid,
        prefix_lens, q_indptr, page_table, given_slots, slot_mapping, tiles, _or(work, tiles), num_reqs, num_rows,
        num_tiles, shape.group, shape.num_kv_heads, shape.room, page_table.stride(0), pieces, programs,
        shape.window_left,
        PAGE=shape.page_size, GIVEN=given_slots is not None, BLOCK_M=tile.block_m, BLOCK_R=block_r, BLOCK=block,
        CUT=pieces > 1, BLOCK_N=tile.block_n, WINDOW=shape.window, ITEM_COST=ITEM_COST, LEAST_SHARE=LEAST_SHARE,
        ONCE=cut_costs(shape.head_dim)[0], BLOCK_TILES=block_tiles, BLOCK_PIECES=block_pieces,
    )  # fmt: skip


def attend(
    shape: Attention,
    tile: Tile,
    extent: Extent,
    pieces: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    mask: torch.Tensor | None,
    depth: torch.Tensor | None,
    work: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    q_indptr: torch.Tensor | None = None,
    block: bool = False,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of few rows a request, and its merge; see `uniform.attend_uniform` and `merge.merge_pieces`.

    Args:
        mask, depth: of a tree. q_indptr: of a ragged batch. block: all rows of a request see all of its tail.
        sinks: of the query heads, if they have any; see `KVCache`.
    """
    shape = shape.beside(tile.heads)
    tiles = row_tiles(tile, extent.q_len, shape.group)
    tree = mask is not None
    tail = TREE if tree else BLOCK if block else CAUSAL
    if tile.members:
        _attend_hopper(
            shape, tile, extent, pieces, q, k, v, k_scale, v_scale, prefix_lens, page_table, mask, depth, work,
            partial_out, partial_lse, out, lse, q_indptr, tail, sinks,
        )  # fmt: skip
    else:
        _attend_triton(
            shape, tile, extent, pieces, q, k, v, k_scale, v_scale, prefix_lens, page_table, mask, depth, work,
            partial_out, partial_lse, out, lse, q_indptr, tail, sinks,
        )  # fmt: skip
    if pieces > 1:
        _merge(
            shape, extent, pieces, tiles * tile.block_m, _or(q_indptr, prefix_lens), None, work, partial_out,
            partial_lse, out, lse, sinks,
        )  # fmt: skip


def _attend_triton(
    shape: Attention,
    tile: Tile,
    extent: Extent,
    pieces: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    mask: torch.Tensor | None,
    depth: torch.Tensor | None,
    work: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_indptr: torch.Tensor | None,
    tail: int,
    sinks: torch.Tensor | None,
) -> None:
    tiles, tree = row_tiles(tile, extent.q_len, shape.group), mask is not None
    start(
        compiled_or_interpreted(q).uniform.attend_uniform, (tiles, shape.num_kv_heads, pieces),
        q, _source(k, shape, tile), _source(v, shape, tile), k_scale, v_scale, sinks, out, lse,
        partial_out, partial_lse, work, prefix_lens, _or(q_indptr, prefix_lens), page_table,
        mask if tree else prefix_lens, depth if tree else prefix_lens,
        extent.q_len, extent.tail_len, extent.num_reqs, extent.num_rows, shape.group,
        0 if mask is None else mask.stride(0), shape.window_left,
        shape.scale * LOG2E, shape.cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        page_table.stride(0), *k.stride()[:3], *v.stride()[:3],
        PAGE=shape.page_size, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, HEAD_DIM=shape.head_dim,
        BLOCK_D=shape.block_d, TAIL=tail, RAGGED=extent.ragged, WINDOW=shape.window, CAP=shape.cap > 0,
        SCALED=scaled(k_scale, v_scale), SINKS=sinks is not None, USE_TMA=tile.tma, WITH_LSE=lse is not None,
        ITEM_COST=ITEM_COST, PDL=shape.pdl, STAGES=tile.num_stages, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **dependent(shape.pdl),
    )  # fmt: skip


def _attend_hopper(
    shape: Attention,
    tile: Tile,
    extent: Extent,
    pieces: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    mask: torch.Tensor | None,
    depth: torch.Tensor | None,
    work: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q_indptr: torch.Tensor | None,
    tail: int,
    sinks: torch.Tensor | None,
) -> None:
    tiles, tree = row_tiles(tile, extent.q_len, shape.group), mask is not None
    package = boxes.hopper()
    gathered, uniform = package.gathered.attend_gathered, package.uniform.attend_uniform
    k, v = (boxes.beside(one, tile.heads) for one in (k, v))
    kv, places = gathering.sources(k, v, shape.page_size, tile)
    start(
        gathered if tile.gather else package.narrow.attend_narrow if tile.narrow else uniform,
        (tiles, shape.num_kv_heads, pieces),
        q, *kv, _or(k_scale, q), _or(v_scale, q), _or(sinks, q), out, _or(lse, partial_lse), partial_out, partial_lse,
        work, prefix_lens, _or(q_indptr, prefix_lens), page_table, mask if tree else prefix_lens,
        depth if tree else prefix_lens, extent.q_len, extent.tail_len, extent.num_reqs, extent.num_rows, shape.group,
        0 if mask is None else mask.stride(0), shape.window_left, shape.scale * LOG2E, shape.cap, q.stride(0),
        q.stride(1), out.stride(0), out.stride(1), page_table.stride(0), *places, PAGE=shape.page_size,
        BLOCK_N=tile.block_n, HEAD_DIM=shape.head_dim, TAIL=tail, RAGGED=extent.ragged, WINDOW=shape.window,
        CAP=shape.cap > 0, SCALED=scaled(k_scale, v_scale), SINKS=sinks is not None, WITH_LSE=lse is not None,
        ITEM_COST=ITEM_COST, PDL=shape.pdl, STAGES=tile.num_stages, HEADS=tile.heads, STEP=_step(q, out),
        **gathering.options(tile, k, q, shape.page_size), **dependent(shape.pdl),
    )  # fmt: skip


def _merge(
    shape: Attention,
    extent: Extent,
    pieces: int,
    height: int,
    q_indptr: torch.Tensor,
    row_tiles: torch.Tensor | None,
    work: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    cut = row_tiles is not None
    kernel, rows = compiled_or_interpreted(out).merge.merge_pieces, height if cut else extent.q_len * shape.group
    # In the interpreter a program costs milliseconds, whatever it holds.
    cells = MERGE_CELLS if isinstance(kernel, triton.JITFunction) else 16 * MERGE_CELLS
    block_pieces = min(64, next_power_of_two(pieces // extent.num_reqs + 2))
    block_cols = min(max(16, next_power_of_two(shape.head_dim)), max(32, cells // block_pieces))
    block_rows = max(1, min(next_power_of_two(rows), cells // (block_pieces * block_cols)))
    blocks = triton.cdiv(rows, block_rows) * triton.cdiv(shape.head_dim, block_cols)
    start(
        kernel, (blocks, shape.num_kv_heads, min(extent.num_reqs, pieces - 1)),
        partial_out, partial_lse, work, q_indptr, _or(row_tiles, work), sinks, out, lse, extent.q_len, shape.group,
        pieces, height, out.stride(0), out.stride(1), HEAD_DIM=shape.head_dim, BLOCK_ROWS=block_rows,
        BLOCK_COLS=block_cols, BLOCK_PIECES=block_pieces, RAGGED=extent.ragged, CUT=cut, SINKS=sinks is not None,
        WITH_LSE=lse is not None,
        PDL=shape.pdl, num_warps=1, **dependent(shape.pdl),
    )  # fmt: skip


def attend_extend(
    shape: Attention,
    tile: Tile,
    num_rows: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    cut: Cut | None = None,
) -> None:
    """Ragged causal attention; see `extend.attend_ragged`.

    Args:
        cut: how row tiles are cut by their keys, if they may be.
    """
    count = ragged_tiles(tile, shape.group, num_rows, prefix_lens.shape[0])
    if cut is not None:
        _attend_ragged(
            shape, tile, max(cut.pieces, count), q, k, v, k_scale, v_scale, prefix_lens, q_indptr, page_table, tiles,
            out, lse, sinks, cut.partial_out, cut.partial_lse, cut.work, cut.pieces,
        )  # fmt: skip
        batch = Extent(count, 0, 0, num_rows, ragged=True)
        _merge(
            shape, batch, cut.pieces, tile.block_m, q_indptr, tiles, cut.work, cut.partial_out, cut.partial_lse, out,
            lse, sinks,
        )  # fmt: skip
        return
    _attend_ragged(
        shape, tile, count, q, k, v, k_scale, v_scale, prefix_lens, q_indptr, page_table, tiles, out, lse, sinks, out,
        out, tiles, 1,
    )  # fmt: skip


def _attend_ragged(
    shape: Attention,
    tile: Tile,
    items: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    tiles: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    sinks: torch.Tensor | None,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
    work: torch.Tensor,
    pieces: int,
) -> None:
    cut, programs = pieces > 1, shape.num_kv_heads * items
    pdl = cut and shape.pdl
    if tile.members:
        grid = (min(programs, boxes.places(q, tile)),)
        package, (kv, places) = boxes.hopper(), gathering.sources(k, v, shape.page_size, tile)
        start(
            package.gathered.attend_gathered_ragged if tile.gather else package.extend.attend_ragged, grid,
            q, *kv, _or(k_scale, q), _or(v_scale, q), _or(sinks, q), out, _or(lse, q), partial_out, partial_lse, work,
            tiles, prefix_lens, q_indptr, page_table, shape.group, shape.num_kv_heads, shape.window_left,
            shape.scale * LOG2E, shape.cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
            page_table.stride(0), *places, pieces, PAGE=shape.page_size, BLOCK_N=tile.block_n, HEAD_DIM=shape.head_dim,
            WINDOW=shape.window, CAP=shape.cap > 0, SCALED=scaled(k_scale, v_scale), SINKS=sinks is not None,
            WITH_LSE=lse is not None, CUT=cut, ITEM_COST=ITEM_COST, PDL=pdl, STAGES=tile.num_stages,
            STEP=_step(q, out), **gathering.options(tile, k, q, shape.page_size), **dependent(pdl),
        )  # fmt: skip
        return
    start(
        compiled_or_interpreted(q).extend.attend_ragged, (programs,),
        q, _source(k, shape, tile), _source(v, shape, tile), k_scale, v_scale, sinks, out, lse, partial_out,
        partial_lse, work, tiles, prefix_lens, q_indptr, page_table, shape.group, shape.num_kv_heads,
        shape.window_left, shape.scale * LOG2E, shape.cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1),
        page_table.stride(0), *k.stride()[:3], *v.stride()[:3], pieces,
        PAGE=shape.page_size, BLOCK_M=tile.block_m, HEIGHT=next_power_of_two(tile.block_m), BLOCK_N=tile.block_n,
        HEAD_DIM=shape.head_dim, BLOCK_D=shape.block_d, WINDOW=shape.window, CAP=shape.cap > 0,
        SCALED=scaled(k_scale, v_scale), SINKS=sinks is not None, USE_TMA=tile.tma, WITH_LSE=lse is not None,
        CUT=cut, ITEM_COST=ITEM_COST, PDL=pdl, STAGES=tile.num_stages,
        num_warps=tile.num_warps, num_stages=tile.num_stages, **dependent(pdl),
    )  # fmt: skip


def widen(
    shape: Attention,
    each: int,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    wide_k: torch.Tensor,
    wide_v: torch.Tensor,
    wide_table: torch.Tensor,
) -> None:
    """K and V of a ragged batch in the rows' dtype; see `widen.widen_pages`.

    Args:
        each: pages of WIDE_PAGE that a request has at most, and its row of the new table.
    """
    kernel, block = compiled_or_interpreted(k).widen.widen_pages, next_power_of_two(shape.num_kv_heads * shape.head_dim)
    # In the interpreter a program costs milliseconds, whatever it holds.
    few = max(1, WIDEN_CELLS // block) if isinstance(kernel, triton.JITFunction) else WIDE_PAGE
    tokens = min(few, WIDE_PAGE)
    start(
        kernel, (each * WIDE_PAGE // tokens, prefix_lens.shape[0]),
        k, v, prefix_lens, q_indptr, page_table, wide_k, wide_v, wide_table, each, shape.window_left,
        page_table.stride(0), *k.stride()[:3], *v.stride()[:3], BLOCK_REQS=WIDEN_REQS, PAGE=shape.page_size,
        WIDE_PAGE=WIDE_PAGE,
        NUM_HEADS=shape.num_kv_heads, HEAD_DIM=shape.head_dim, WINDOW=shape.window, SPARE=INTERPRETED_KEYS, BLOCK=block,
        BLOCK_TOKENS=tokens,
    )  # fmt: skip


def scaled(k_scale: torch.Tensor | None, v_scale: torch.Tensor | None) -> int:
    """Which scales there are, as kernels take it: bit 0 for k, bit 1 for v. One that is not there is 1."""
    return (k_scale is not None) + 2 * (v_scale is not None)


def _step(q: torch.Tensor, out: torch.Tensor) -> int:
    """Elements that rows and heads lie a multiple of apart: as many as a thread moves at once, or 1."""
    together = 16 // q.element_size()
    return together if all(stride % together == 0 for stride in (*q.stride()[:2], *out.stride()[:2])) else 1


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A pointer for an argument that a kernel does not read."""
    return other if tensor is None else tensor


def _source(cache: torch.Tensor, shape: Attention, tile: Tile) -> torch.Tensor | TensorDescriptor:
    """The cache as a kernel reads it: itself, or a descriptor of ``[slots, heads · dim]`` with one tile as box."""
    if not tile.tma:
        return cache
    pages, page_size, heads, dim = cache.shape
    return TensorDescriptor(cache, [pages * page_size, heads * dim], [cache.stride(1), 1], [tile.block_n, dim])
