"""Shared memory of a CTA: rows of q, the pipeline stages of K and V, and their full and empty barriers."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from .config import num_column_parts, num_empty_arrivals, part_width
from .gluon_compat import thread_barrier


class TensorPipeline(NamedTuple):
    """K or V of a ring.

    Attributes:
        tiles: room for as many tiles as there are slots, by the parts of their columns.
        full, empty: of each slot, a barrier that says its tile is there; that its room is.
    """

    tiles: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class KvPipeline(NamedTuple):
    """Slots that tiles pass through, each in K and in V."""

    k: TensorPipeline
    v: TensorPipeline


@gluon.constexpr_function
def kv_tile_layout(keys, dim, dtype, full_head):
    """Layout of a tile in shared memory: 128 bytes of every key, then the next 128; of whole heads, which come 8 keys
    at a time, the same of every 8 keys. wgmma reads either: blocks of 8 keys and 128 bytes, swizzled, at two distances.
    """
    if not full_head:
        return gl.NVMMASharedLayout.get_default_for([keys, dim], dtype)
    inner = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32]]
    across = [[0, 1 << bit] for bit in range(6, dim.bit_length() - 1)]
    down = [[1 << bit, 0] for bit in range(3, keys.bit_length() - 1)]
    return gl.SharedLinearLayout(inner + across + down, alignment=1024)


@gluon.jit
def allocate_part(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, FULL_HEAD: gl.constexpr
):
    """Room for COUNT times ROWS rows of WIDTH elements."""
    layout: gl.constexpr = kv_tile_layout(ROWS, WIDTH, dtype, FULL_HEAD)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, WIDTH], layout)


@gluon.jit
def allocate_rows(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, CFG: gl.constexpr, FULL_HEAD: gl.constexpr = False,
    ELEMS_PER_CELL: gl.constexpr = 1,
):  # fmt: skip
    """Room for COUNT times ROWS rows, by the parts of their columns, of which one element holds ELEMS_PER_CELL."""
    rows = ()
    for part in gl.static_range(num_column_parts(CFG)):
        one = allocate_part(dtype, COUNT, ROWS, part_width(CFG, part) // ELEMS_PER_CELL, FULL_HEAD)
        rows = rows + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def stage_of(parts, stage):
    """One tile of a ring, or one group's rows, by the parts of its columns."""
    return [one.index(stage) for one in parts]


@gluon.jit
def make_pipeline(
    dtype: gl.constexpr, CONSUMER_ARRIVALS: gl.constexpr, STAGES: gl.constexpr, CFG: gl.constexpr,
    PRODUCER_ARRIVALS: gl.constexpr = 1, FULL_HEAD: gl.constexpr = False, ELEMS_PER_CELL: gl.constexpr = 1,
):  # fmt: skip
    """A `KvPipeline` of STAGES slots.

    PRODUCER_ARRIVALS: arrivals that fill a tile. CONSUMER_ARRIVALS: those that leave it. FULL_HEAD: heads come whole,
        of 16-bit elements.
    ELEMS_PER_CELL: columns that one element of `dtype` holds.
    """
    k_tiles = allocate_rows(dtype, STAGES, CFG.BLOCK_N, CFG, FULL_HEAD, ELEMS_PER_CELL)
    v_tiles = allocate_rows(dtype, STAGES, CFG.BLOCK_N, CFG, FULL_HEAD, ELEMS_PER_CELL)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=PRODUCER_ARRIVALS)
        mbarrier.init(v_full.index(i), count=PRODUCER_ARRIVALS)
        mbarrier.init(k_empty.index(i), count=CONSUMER_ARRIVALS)
        mbarrier.init(v_empty.index(i), count=CONSUMER_ARRIVALS)
    fence_async_shared()
    thread_barrier()
    return KvPipeline(
        k=TensorPipeline(tiles=k_tiles, full=k_full, empty=k_empty),
        v=TensorPipeline(tiles=v_tiles, full=v_full, empty=v_empty),
    )


@gluon.jit
def release(empty, CFG: gl.constexpr):
    """A folding group gives a tile back, once its products have read it: each thread by itself, and waits for no other.

    The arrival is the one of copies that a thread has under way, of which a folding one has none.
    """
    if num_empty_arrivals(CFG) == CFG.NUM_CONSUMER_WGS:
        mbarrier.arrive(empty, count=1)
    else:
        async_copy.mbarrier_arrive(empty, increment_count=False)


@gluon.jit
def grid_dependency_sync():
    """Wait for the grids before this one, which took its place while they ran; then let the next one take its own.

    In this order: the merge reads the schedule before it waits for the attention, and so may not start before
    whoever wrote the schedule has ended. What a grid reads or writes of global memory comes after this call.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """The next slot of the ring; its phase flips at the end."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
