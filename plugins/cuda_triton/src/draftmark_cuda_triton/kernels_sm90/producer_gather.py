"""Gathering producer for pages of any size: four warps copy keys into the pipeline by cp.async, 16 bytes a thread.

    page table ─► one entry a lane ─► shuffled to the threads of its row ─► cp.async ─► │ K0 V0 │ K1 V1 │ …
      a tile ahead of its copies         16 threads have a row of 256 B                 full: all 128 threads

What the ring holds afterwards is what boxes of BLOCK_N rows would have put there: the same swizzled rows, and a tile
that ends with the last key. So masks and folds take this ring for one of pages of BLOCK_N tokens.

cp.async writes shared memory as ordinary stores do, and wgmma reads it as the copy engine does: a fold puts a fence
between the two, behind its wait (`mainloop.wait_full`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from .config import num_column_parts, part_offset, part_width, row_copy_layout
from .gluon_compat import cp_async
from .mask import key_positions
from .pipeline import advance

GATHER_WARPS = gl.constexpr(4)
"""Warps that gather: a warp group, which one fetching warp occupies as well."""
GATHER_THREADS = gl.constexpr(32 * GATHER_WARPS.value)
"""What arrives at a barrier for a tile of K, or of V."""


@gluon.constexpr_function
def copy_layout(CFG, part, warps):
    """Who copies which 16 bytes of a part of a tile: by `row_copy_layout`, or of its second part, by the warp that
    copies the first part of a row.
    """
    if part == 0:
        return row_copy_layout(CFG.BLOCK_D, warps)
    rows, across = CFG.BLOCK_N.bit_length() - 1, (CFG.BLOCK_D_REST // 8).bit_length() - 1
    begin = (256 // CFG.BLOCK_D).bit_length() - 1
    end = begin + warps.bit_length() - 1
    bits = [[1 << bit, 0] for bit in range(rows)]
    own = bits[:begin] + bits[end:]
    lanes = [[0, 8 << bit] for bit in range(across)] + own[: 5 - across]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *own[5 - across :]], lanes, bits[begin:end], [], [CFG.BLOCK_N, CFG.BLOCK_D_REST]
    )


@gluon.constexpr_function
def page_id_layout(rows, block_d, warps):
    """Who asks for which of a tile's page ids: the lanes of a warp share out the rows that it copies."""
    rows_per_warp = 256 // block_d
    steps = [[rows_per_warp * warps * 2**i] for i in range((rows // (rows_per_warp * warps)).bit_length() - 1)]
    own = [[2**i] for i in range(rows_per_warp.bit_length() - 1)]
    lanes = steps + [[0]] * (5 - len(steps) - len(own)) + own
    return gl.DistributedLinearLayout(
        [], lanes, [[rows_per_warp * 2**i] for i in range(warps.bit_length() - 1)], [], [rows]
    )


@gluon.jit
def load_page_ids(page_table_row, tile, kv_len, CFG: gl.constexpr, ids_layout: gl.constexpr):
    """Page id of each column's key; 0 where there is none."""
    position, stored = key_positions(tile, kv_len, CFG.BLOCK_N, CFG.BLOCK_N, ids_layout)
    return gl.load(page_table_row + position // CFG.PAGE_SIZE, mask=stored, other=0)


@gluon.jit
def distribute_page_ids(page_ids, CFG: gl.constexpr):
    """Page id of each row, with the threads that copy it, of each part of a tile."""
    pages = ()
    for part in gl.static_range(num_column_parts(CFG)):
        ids = gl.convert_layout(page_ids, gl.SliceLayout(1, copy_layout(CFG, part, gl.num_warps())))
        pages = pages + (ids,)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def add_offset_64(base, index, stride):
    """base + index · stride, 64-bit (page · P passes 2**31 in a large pool, vllm#47671): one instruction where the
    compiler would widen both factors first, and multiply them in five.
    """
    if stride.dtype == gl.int64:
        return base + index.to(gl.int64) * stride
    else:
        return gl.inline_asm_elementwise(
            "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [index, stride, base], dtype=gl.int64, is_pure=True, pack=1
        )


@gluon.jit
def copy_tile(source, tiles, stage, pages, tile, head, kv_len, CFG: gl.constexpr):
    """Begin to copy a tile of K, or of V, to its slot of the ring.

    Args:
        source: pointer to ``[pages, P, heads, dim]``, and its first three strides in bytes, multiples of 16.
        pages: page id of each row, of `distribute_page_ids`.
    """
    for part in gl.static_range(num_column_parts(CFG)):
        copy_tile_part(source, tiles[part].index(stage), pages[part], tile, head, kv_len, part, CFG)


@gluon.jit
def copy_tile_part(source, smem, pages, tile, head, kv_len, part: gl.constexpr, CFG: gl.constexpr):
    """The same of a part of its columns."""
    layout: gl.constexpr = copy_layout(CFG, part, gl.num_warps())
    tensor, stride_page, stride_slot, stride_head = source
    position, stored = key_positions(tile, kv_len, CFG.BLOCK_N, CFG.BLOCK_N, gl.SliceLayout(1, layout))
    at = add_offset_64(tensor.to(gl.int64) + head.to(gl.int64) * stride_head, pages, stride_page)
    if CFG.PAGE_SIZE > 1:
        at = add_offset_64(at, position % CFG.PAGE_SIZE, stride_slot)
    # 16 bytes a copy: the compiler cannot know it of a sum that it has not made.
    rows = gl.multiple_of(at.to(tensor.dtype), 16)
    col = part_offset(CFG, part) + gl.arange(0, part_width(CFG, part), gl.SliceLayout(0, layout))
    cp_async(
        smem, rows[:, None] + col[None, :], mask=stored[:, None] & (col < CFG.KV_HEADS_PER_TILE * CFG.HEAD_DIM)[None, :]
    )


@gluon.jit
def gather_tiles(
    k_source, v_source, pipeline, stage, phase, page_table_row, head, first, stop, kv_len, CFG: gl.constexpr
):
    """Bring tiles [first, stop) of one request; columns without a key become zeros, and nothing is read for them."""
    ids_layout: gl.constexpr = page_id_layout(CFG.BLOCK_N, CFG.BLOCK_D, gl.num_warps())
    next_ids = load_page_ids(page_table_row, first, kv_len, CFG, ids_layout)
    for tile in range(first, stop):
        pages = distribute_page_ids(next_ids, CFG)
        # Ids of the next tile travel while this one's keys do, and while the ring is full.
        next_ids = load_page_ids(page_table_row, gl.minimum(tile + 1, stop - 1), kv_len, CFG, ids_layout)
        mbarrier.wait(pipeline.k.empty.index(stage), phase ^ 1)
        copy_tile(k_source, pipeline.k.tiles, stage, pages, tile, head, kv_len, CFG)
        async_copy.mbarrier_arrive(pipeline.k.full.index(stage), increment_count=False)
        mbarrier.wait(pipeline.v.empty.index(stage), phase ^ 1)
        copy_tile(v_source, pipeline.v.tiles, stage, pages, tile, head, kv_len, CFG)
        async_copy.mbarrier_arrive(pipeline.v.full.index(stage), increment_count=False)
        stage, phase = advance(stage, phase, CFG.STAGES)
    return stage, phase
