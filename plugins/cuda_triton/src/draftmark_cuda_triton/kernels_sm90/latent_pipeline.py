"""Shared memory of the latent kernel: rows of q, pipeline stages of latent rows, and the exchange of p."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from .config import row_copy_layout
from .gluon_compat import cp_async, thread_barrier
from .latent_config import chunk_width, num_chunks
from .pack_gqa import split_packed_row


class LatentPart(NamedTuple):
    """Holds the pipeline stages of one part of the rows.

    Attributes:
        tiles: shared memory ``[STAGES, BLOCK_N, width]`` of each chunk.
        full: one mbarrier a stage; it completes when the stage's part is loaded.
        empty: one mbarrier a stage; it completes when the last product that reads the part has ended.
    """

    tiles: tuple[gl.shared_memory_descriptor, ...]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


class LatentPipeline(NamedTuple):
    """Pipeline of latent rows: both halves of the values, and the rest, which is () if rows have no rest."""

    halves: tuple[LatentPart, LatentPart]
    rest: LatentPart


class Exchange(NamedTuple):
    """Messages from the softmax warp group to both value warp groups.

    A message is p of a tile with the factors of the old accumulators, or after the last tile the factors of the output.

    Attributes:
        weights: ``[64, BLOCK_N]`` p in q's dtype.
        factors: ``[64]`` float32, factor of each row's accumulators.
        full: mbarrier that completes when a message is written.
        empty: mbarrier that completes when both value warp groups no longer read the message.
    """

    weights: gl.shared_memory_descriptor
    factors: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@gluon.jit
def allocate(dtype: gl.constexpr, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Allocate shared memory ``[COUNT, ROWS, WIDTH]`` in the swizzle that wgmma reads."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    return gl.allocate_shared_memory(dtype, [COUNT, ROWS, WIDTH], layout)


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate and initialize COUNT mbarriers of ARRIVALS arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def make_part(dtype: gl.constexpr, CHUNKS: gl.constexpr, WIDTH: gl.constexpr, CFG: gl.constexpr):
    """Allocate the stages of one part. TMA completes a full barrier, and 128 threads an empty barrier."""
    tiles = ()
    for _ in gl.static_range(CHUNKS):
        tiles = tiles + (allocate(dtype, CFG.STAGES, CFG.BLOCK_N, WIDTH),)  # type: ignore[assignment]  # noqa: RUF005
    return LatentPart(
        tiles=tiles, full=allocate_barriers(CFG.STAGES, 1), empty=allocate_barriers(CFG.STAGES, 128)
    )  # fmt: skip


@gluon.jit
def make_latent_pipeline(dtype: gl.constexpr, CFG: gl.constexpr):
    """Allocate a `LatentPipeline`."""
    left = make_part(dtype, num_chunks(CFG), chunk_width(CFG), CFG)
    right = make_part(dtype, num_chunks(CFG), chunk_width(CFG), CFG)
    rest = ()
    if CFG.REST_DIM > 0:
        rest = make_part(dtype, 1, CFG.REST_DIM, CFG)
    return LatentPipeline(halves=(left, right), rest=rest)  # type: ignore[arg-type]


@gluon.jit
def make_exchange(dtype: gl.constexpr, CFG: gl.constexpr):
    """Allocate an `Exchange`. One thread completes its full barrier, and 256 threads its empty barrier."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return Exchange(
        weights=allocate(dtype, 1, 64, CFG.BLOCK_N).index(0),
        factors=gl.allocate_shared_memory(gl.float32, [64], layout), full=allocate_barriers(1, 1).index(0),
        empty=allocate_barriers(1, 256).index(0),
    )  # fmt: skip


@gluon.jit
def allocate_queries(dtype: gl.constexpr, CFG: gl.constexpr):
    """Allocate the rows of q: every chunk of the value columns in order, then the rest."""
    queries = ()
    for _ in gl.static_range(2 * num_chunks(CFG)):
        queries = queries + (allocate(dtype, 1, 64, chunk_width(CFG)).index(0),)  # type: ignore[assignment]  # noqa: RUF005
    if CFG.REST_DIM > 0:
        queries = queries + (allocate(dtype, 1, 64, CFG.REST_DIM).index(0),)  # type: ignore[assignment]  # noqa: RUF005
    return queries


@gluon.jit
def copy_query_part(
    smem, q, first, count, group, inv_group, stride_row, stride_head, column: gl.constexpr, CFG: gl.constexpr
):
    """Issue the cp.async copies of some columns of 64 packed rows; rows at and after `count` are zeros."""
    WIDTH: gl.constexpr = smem.shape[1]
    layout: gl.constexpr = row_copy_layout(WIDTH, 4)
    packed = first + gl.arange(0, 64, gl.SliceLayout(1, layout))
    col = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    row, head = split_packed_row(packed, group, inv_group)
    at = gl.multiple_of(row * stride_row + head * stride_head, 8)
    pointers = q + (at[:, None] + col[None, :])
    cp_async(smem, pointers, mask=(packed < count)[:, None] & (col >= 0)[None, :])


@gluon.jit
def copy_queries(queries, q, begin, first, count, group, inv_group, stride_row, stride_head, CFG: gl.constexpr):
    """Copy 64 packed rows of q to shared memory and wait; arguments as in `pack_gqa.load_q`.

    Every head of every row starts at a multiple of 16 bytes (`attention.has_aligned_rows`).
    """
    rows = q + gl.multiple_of(begin.to(gl.int64) * stride_row, 8)
    for part in gl.static_range(len(queries)):
        copy_query_part(
            queries[part], rows, first, count, group, inv_group, stride_row, stride_head, part * chunk_width(CFG), CFG
        )
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    thread_barrier()
