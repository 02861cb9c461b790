"""Shared memory of a CTA: rows of q, the pipeline stages of K and V, and their full and empty barriers."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from .config import num_column_parts, num_empty_arrivals, part_width
from .gluon_compat import thread_barrier


class TensorPipeline(NamedTuple):
    """Holds the pipeline stages of K or of V: shared memory and barriers.

    Attributes:
        tiles: shared memory ``[STAGES, BLOCK_N, width]``, one entry for each column part.
        full: one mbarrier a stage; it completes when the stage's tile is loaded.
        empty: one mbarrier a stage; it completes when the consumers no longer read the tile.
    """

    tiles: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class KvPipeline(NamedTuple):
    """Pipeline of K tiles and of V tiles, with the same number of stages."""

    k: TensorPipeline
    v: TensorPipeline


@gluon.constexpr_function
def kv_tile_layout(keys, dim, dtype, full_head):
    """Return the shared-memory layout of a K or V tile, in the 128-byte swizzle that wgmma reads.

    Normally the tile holds the first 128 bytes of every key, then the next 128 bytes of every key. With `full_head`, a
    TMA box loads all 256 bytes of 8 keys, so this order repeats for each 8 keys. Both layouts consist of blocks of 8
    keys x 128 bytes; only the distances between blocks differ.
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
    """Allocate shared memory ``[COUNT, ROWS, WIDTH]`` for one column part."""
    layout: gl.constexpr = kv_tile_layout(ROWS, WIDTH, dtype, FULL_HEAD)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, WIDTH], layout)


@gluon.jit
def allocate_rows(
    dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, CFG: gl.constexpr, FULL_HEAD: gl.constexpr = False,
    ELEMS_PER_CELL: gl.constexpr = 1,
):  # fmt: skip
    """Allocate shared memory ``[COUNT, ROWS, width]`` for each column part; an element holds ELEMS_PER_CELL columns."""
    rows = ()
    for part in gl.static_range(num_column_parts(CFG)):
        one = allocate_part(dtype, COUNT, ROWS, part_width(CFG, part) // ELEMS_PER_CELL, FULL_HEAD)
        rows = rows + (one,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def stage_of(parts, stage):
    """Return one pipeline stage's tile, or one warp group's rows, as a list of column parts."""
    return [one.index(stage) for one in parts]


@gluon.jit
def make_pipeline(
    dtype: gl.constexpr, CONSUMER_ARRIVALS: gl.constexpr, STAGES: gl.constexpr, CFG: gl.constexpr,
    PRODUCER_ARRIVALS: gl.constexpr = 1, FULL_HEAD: gl.constexpr = False, ELEMS_PER_CELL: gl.constexpr = 1,
):  # fmt: skip
    """Allocate a `KvPipeline` of STAGES stages and initialize its barriers.

    Args:
        CONSUMER_ARRIVALS: arrivals that complete an empty barrier.
        PRODUCER_ARRIVALS: arrivals that complete a full barrier.
        FULL_HEAD: full-head boxes: a TMA box holds all 256 bytes of a head of 16-bit elements (`kv_tile_layout`).
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
def make_pipelines(
    dtype: gl.constexpr, kv_dtype: gl.constexpr, FULL_HEAD: gl.constexpr, UPCAST_FP8: gl.constexpr, CFG: gl.constexpr
):
    """Allocate the pipeline that consumers read and the one that TMA loads into.

    They are the same, unless the upcast partition converts e4m3 tiles from one into the other, or transposes V.
    """
    if CFG.ROUNDS:
        pipeline, loaded = make_e4m3_pipelines(num_empty_arrivals(CFG), CFG.STAGES, CFG)
    elif UPCAST_FP8:
        pipeline = make_pipeline(dtype, num_empty_arrivals(CFG), CFG.STAGES, CFG, FULL_HEAD=FULL_HEAD)
        loaded = make_pipeline(kv_dtype, 1, CFG.FP8_STAGES, CFG)
    else:
        pipeline = make_pipeline(dtype, num_empty_arrivals(CFG), CFG.STAGES, CFG, FULL_HEAD=FULL_HEAD)
        loaded = pipeline
    return pipeline, loaded


@gluon.jit
def make_e4m3_pipelines(CONSUMER_ARRIVALS: gl.constexpr, STAGES: gl.constexpr, CFG: gl.constexpr):
    """Allocate the pipelines of `mma_e4m3`: K as loaded and V transposed; K as loaded and V as loaded.

    Returns:
        Two `KvPipeline`: the one that consumers read, with V ``[STAGES, width, BLOCK_N]``, and the one that TMA loads
        into, with V as elements of two e4m3 values.
    """
    k = make_tensor_pipeline(gl.float8e4nv, CONSUMER_ARRIVALS, STAGES, CFG, False)
    v = make_tensor_pipeline(gl.float8e4nv, CONSUMER_ARRIVALS, STAGES, CFG, True)
    loaded_tiles = allocate_rows(gl.int16, STAGES, CFG.BLOCK_N, CFG, False, 2)
    full, empty = make_barriers(1, 1, STAGES)
    fence_async_shared()
    thread_barrier()
    loaded = TensorPipeline(tiles=loaded_tiles, full=full, empty=empty)
    return KvPipeline(k=k, v=v), KvPipeline(k=k, v=loaded)


@gluon.jit
def make_tensor_pipeline(
    dtype: gl.constexpr, CONSUMER_ARRIVALS: gl.constexpr, STAGES: gl.constexpr, CFG: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):  # fmt: skip
    """Allocate the stages of K or V tiles ``[BLOCK_N, width]``, or of ``[width, BLOCK_N]``, and their barriers."""
    tiles = ()
    for part in gl.static_range(num_column_parts(CFG)):
        WIDTH: gl.constexpr = part_width(CFG, part)
        if TRANSPOSED:
            one = allocate_part(dtype, STAGES, WIDTH, CFG.BLOCK_N, False)
        else:
            one = allocate_part(dtype, STAGES, CFG.BLOCK_N, WIDTH, False)
        tiles = tiles + (one,)  # type: ignore[assignment]  # noqa: RUF005
    full, empty = make_barriers(1, CONSUMER_ARRIVALS, STAGES)
    return TensorPipeline(tiles=tiles, full=full, empty=empty)


@gluon.jit
def make_barriers(PRODUCER_ARRIVALS: gl.constexpr, CONSUMER_ARRIVALS: gl.constexpr, STAGES: gl.constexpr):
    """Allocate and initialize the full and the empty barrier of each stage."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=PRODUCER_ARRIVALS)
        mbarrier.init(empty.index(i), count=CONSUMER_ARRIVALS)
    return full, empty


@gluon.jit
def release(empty, CFG: gl.constexpr):
    """Signal that the consumers no longer read a stage, without a barrier within the warp group.

    Every consumer thread executes cp.async.mbarrier.arrive. Consumers have no outstanding cp.async, so it arrives at
    once, without a barrier among the threads. With three consumer warp groups, one thread of each group arrives
    (`num_empty_arrivals`).
    """
    if num_empty_arrivals(CFG) == CFG.NUM_CONSUMER_WGS:
        mbarrier.arrive(empty, count=1)
    else:
        async_copy.mbarrier_arrive(empty, increment_count=False)


@gluon.jit
def grid_dependency_wait():
    """Wait for the preceding grids (programmatic dependent launch)."""
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def grid_dependency_sync():
    """Wait for the preceding grids (programmatic dependent launch), then permit the next grid to start.

    This order is required. The combine kernel reads the tile schedule before it waits for the attention kernel, so it
    must not start before the kernel that wrote the schedule has ended. All accesses to global memory follow this call.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def advance(stage, phase, STAGES: gl.constexpr):
    """Return the next stage and its phase; the phase flips after the last stage."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
