"""Gathering producer for pages of any size: four warps copy keys into the pipeline by cp.async, 16 bytes a thread.

    page table ─► one entry a lane ─► shuffled to the threads of its row ─► cp.async ─► │ K0 V0 │ K1 V1 │ …
      a tile ahead of its copies         16 threads have a row of 256 B                 full: all 128 threads

The pipeline then holds the rows that TMA boxes of BLOCK_N keys would have loaded, swizzled alike, with the request's
last key at the end of its tile. So the mask and the mainloop treat it as a pipeline over pages of BLOCK_N tokens.

cp.async writes shared memory through the generic proxy, and wgmma reads it through the async proxy. The consumers
therefore execute a proxy fence after their wait (`mainloop.wait_full`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from .config import num_column_parts, part_offset, part_width, row_copy_layout
from .gluon_compat import cp_async
from .mask import key_positions
from .pipeline import advance

GATHER_WARPS = gl.constexpr(4)
"""Warps of the gathering producer: one warp group. A producer of one TMA warp reserves a whole warp group too."""
GATHER_THREADS = gl.constexpr(32 * GATHER_WARPS.value)
"""Threads that arrive at a full barrier for each tile."""


@gluon.constexpr_function
def copy_layout(CFG, part, warps):
    """Return the layout that assigns 16-byte copies of a column part to threads.

    The first part uses `row_copy_layout`. In the second part, a row is copied by the warp that copies its first part.
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
    """Return the layout of a tile's page ids: the lanes of a warp load the ids of the rows that the warp copies."""
    rows_per_warp = 256 // block_d
    steps = [[rows_per_warp * warps * 2**i] for i in range((rows // (rows_per_warp * warps)).bit_length() - 1)]
    own = [[2**i] for i in range(rows_per_warp.bit_length() - 1)]
    lanes = steps + [[0]] * (5 - len(steps) - len(own)) + own
    return gl.DistributedLinearLayout(
        [], lanes, [[rows_per_warp * 2**i] for i in range(warps.bit_length() - 1)], [], [rows]
    )


@gluon.jit
def loaded_positions(tile, first_key, kv_len, CFG: gl.constexpr, layout: gl.constexpr):
    """Return the position of each column's key, and True where it is loaded: a key exists and a row can see it.

    Pages left of the window (before `first_key`) may belong to another request and contain NaN. If a tile lies in one
    page, that page also holds a visible key, so the request still owns it.
    """
    position, stored = key_positions(tile, kv_len, CFG.BLOCK_N, CFG.BLOCK_N, layout)
    if CFG.WINDOW and CFG.PAGE_SIZE % CFG.BLOCK_N != 0:
        stored = stored & (position >= first_key)
    return position, stored


@gluon.jit
def load_page_ids(page_table_row, tile, first_key, kv_len, CFG: gl.constexpr, ids_layout: gl.constexpr):
    """Load the page id of each key of a tile; 0 for columns that are not loaded."""
    position, stored = loaded_positions(tile, first_key, kv_len, CFG, ids_layout)
    return gl.load(page_table_row + position // CFG.PAGE_SIZE, mask=stored, other=0)


@gluon.jit
def distribute_page_ids(page_ids, CFG: gl.constexpr):
    """Return the page id of each row in the threads that copy it, one tensor for each column part."""
    pages = ()
    for part in gl.static_range(num_column_parts(CFG)):
        ids = gl.convert_layout(page_ids, gl.SliceLayout(1, copy_layout(CFG, part, gl.num_warps())))
        pages = pages + (ids,)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def add_offset_64(base, index, stride):
    """Return base + index · stride in 64 bits, by one instruction where index and stride have 32 bits.

    page · P exceeds 2**31 in a large pool (vllm#47671). The compiler would extend both factors and multiply in five
    instructions.
    """
    if stride.dtype == gl.int64:
        return base + index.to(gl.int64) * stride
    else:
        return gl.inline_asm_elementwise(
            "mad.wide.s32 $0, $1, $2, $3;", "=l,r,r,l", [index, stride, base], dtype=gl.int64, is_pure=True, pack=1
        )


@gluon.jit
def copy_tile(source, tiles, stage, pages, tile, head, first_key, kv_len, CFG: gl.constexpr):
    """Issue the cp.async copies of a K or V tile into its pipeline stage.

    Args:
        source: pointer to ``[pages, P, heads, dim]`` and its first three strides in bytes, multiples of 16.
        pages: page id of each row, from `distribute_page_ids`.
    """
    for part in gl.static_range(num_column_parts(CFG)):
        copy_tile_part(source, tiles[part].index(stage), pages[part], tile, head, first_key, kv_len, part, CFG)


@gluon.jit
def copy_tile_part(source, smem, pages, tile, head, first_key, kv_len, part: gl.constexpr, CFG: gl.constexpr):
    """Issue the cp.async copies of one column part of a tile; see `copy_tile`."""
    layout: gl.constexpr = copy_layout(CFG, part, gl.num_warps())
    tensor, stride_page, stride_slot, stride_head = source
    position, stored = loaded_positions(tile, first_key, kv_len, CFG, gl.SliceLayout(1, layout))
    at = add_offset_64(tensor.to(gl.int64) + head.to(gl.int64) * stride_head, pages, stride_page)
    if CFG.PAGE_SIZE > 1:
        at = add_offset_64(at, position % CFG.PAGE_SIZE, stride_slot)
    # 16-byte copies need aligned addresses, and the compiler cannot derive the alignment of inline assembly's results.
    rows = gl.multiple_of(at.to(tensor.dtype), 16)
    col = part_offset(CFG, part) + gl.arange(0, part_width(CFG, part), gl.SliceLayout(0, layout))
    cp_async(
        smem, rows[:, None] + col[None, :], mask=stored[:, None] & (col < CFG.KV_HEADS_PER_TILE * CFG.HEAD_DIM)[None, :]
    )


@gluon.jit
def gather_tiles(
    k_source, v_source, pipeline, stage, phase, page_table_row, head, first, stop, first_key, kv_len,
    CFG: gl.constexpr
):  # fmt: skip
    """Gather key tiles [first, stop) of one request; columns that are not loaded are zeros and read no memory."""
    ids_layout: gl.constexpr = page_id_layout(CFG.BLOCK_N, CFG.BLOCK_D, gl.num_warps())
    next_ids = load_page_ids(page_table_row, first, first_key, kv_len, CFG, ids_layout)
    for tile in range(first, stop):
        pages = distribute_page_ids(next_ids, CFG)
        # Page ids of the next tile load during this tile's copies and during the wait for an empty stage.
        next_ids = load_page_ids(page_table_row, gl.minimum(tile + 1, stop - 1), first_key, kv_len, CFG, ids_layout)
        mbarrier.wait(pipeline.k.empty.index(stage), phase ^ 1)
        copy_tile(k_source, pipeline.k.tiles, stage, pages, tile, head, first_key, kv_len, CFG)
        async_copy.mbarrier_arrive(pipeline.k.full.index(stage), increment_count=False)
        mbarrier.wait(pipeline.v.empty.index(stage), phase ^ 1)
        copy_tile(v_source, pipeline.v.tiles, stage, pages, tile, head, first_key, kv_len, CFG)
        async_copy.mbarrier_arrive(pipeline.v.full.index(stage), increment_count=False)
        stage, phase = advance(stage, phase, CFG.STAGES)
    return stage, phase
