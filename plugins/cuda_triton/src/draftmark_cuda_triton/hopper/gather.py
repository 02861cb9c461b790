"""The fetching role for pages of any size: four warps copy keys one by one into the ring, 16 bytes a thread.

    page table ─► one entry a lane ─► shuffled to the threads of its row ─► cp.async ─► │ K0 V0 │ K1 V1 │ …
      a tile ahead of its copies         16 threads have a row of 256 B                 full: all 128 threads

What the ring holds afterwards is what boxes of BLOCK_N rows would have put there: the same swizzled rows, and a tile
that ends with the last key. So masks and folds take this ring for one of pages of BLOCK_N tokens.

cp.async writes shared memory as ordinary stores do, and wgmma reads it as the copy engine does: a fold puts a fence
between the two, behind its wait (`fold.wait_for_tile`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from .constants import first_of, parts_of, spread_of, width_of
from .mask import key_positions
from .names import copy_rows
from .ring import next_slot

GATHERERS = gl.constexpr(4)
"""Warps that gather: a warp group, which one fetching warp occupies as well."""
GATHER_THREADS = gl.constexpr(32 * GATHERERS.value)
"""What arrives at a barrier for a tile of K, or of V."""
GATHER_REGISTERS, CROWDED_REGISTERS = gl.constexpr(64), gl.constexpr(56)
"""Of a gathering thread, beside one group of folding warps, and beside two."""


@gluon.constexpr_function
def copied_by(C, part, warps):
    """Who copies which 16 bytes of a part of a tile: by `spread_of`, or of its second part, by the warp that copies the
    first part of a row.
    """
    if part == 0:
        return spread_of(C.BLOCK_D, warps)
    rows, across = C.BLOCK_N.bit_length() - 1, (C.REST // 8).bit_length() - 1
    begin = (256 // C.BLOCK_D).bit_length() - 1
    end = begin + warps.bit_length() - 1
    bits = [[1 << bit, 0] for bit in range(rows)]
    own = bits[:begin] + bits[end:]
    lanes = [[0, 8 << bit] for bit in range(across)] + own[: 5 - across]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], *own[5 - across :]], lanes, bits[begin:end], [], [C.BLOCK_N, C.REST]
    )


@gluon.constexpr_function
def asked_of(rows, block_d, warps):
    """Who asks for which of a tile's page ids: the lanes of a warp share out the rows that it copies."""
    beside = 256 // block_d
    steps = [[beside * warps * 2**i] for i in range((rows // (beside * warps)).bit_length() - 1)]
    own = [[2**i] for i in range(beside.bit_length() - 1)]
    lanes = steps + [[0]] * (5 - len(steps) - len(own)) + own
    return gl.DistributedLinearLayout([], lanes, [[beside * 2**i] for i in range(warps.bit_length() - 1)], [], [rows])


@gluon.jit
def ask_for_pages(page_row, tile, kv_len, C: gl.constexpr, asked: gl.constexpr):
    """Page id of each column's key; 0 where there is none."""
    position, here = key_positions(tile, kv_len, C.BLOCK_N, C.BLOCK_N, asked)
    return gl.load(page_row + position // C.PAGE, mask=here, other=0)


@gluon.jit
def pages_of(asked, C: gl.constexpr):
    """Page id of each row, with the threads that copy it, of each part of a tile."""
    pages = ()
    for part in gl.static_range(parts_of(C)):
        ids = gl.convert_layout(asked, gl.SliceLayout(1, copied_by(C, part, gl.num_warps())))
        pages = pages + (ids,)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def far(base, index, stride):
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
def copy_keys(source, tiles, slot, pages, tile, head, kv_len, C: gl.constexpr):
    """Begin to copy a tile of K, or of V, to its slot of the ring.

    Args:
        source: pointer to ``[pages, P, heads, dim]``, and its first three strides in bytes, multiples of 16.
        pages: page id of each row, of `pages_of`.
    """
    for part in gl.static_range(parts_of(C)):
        copy_part(source, tiles[part].index(slot), pages[part], tile, head, kv_len, part, C)


@gluon.jit
def copy_part(source, place, pages, tile, head, kv_len, part: gl.constexpr, C: gl.constexpr):
    """The same of a part of its columns."""
    spread: gl.constexpr = copied_by(C, part, gl.num_warps())
    tensor, stride_page, stride_slot, stride_head = source
    position, here = key_positions(tile, kv_len, C.BLOCK_N, C.BLOCK_N, gl.SliceLayout(1, spread))
    at = far(tensor.to(gl.int64) + head.to(gl.int64) * stride_head, pages, stride_page)
    if C.PAGE > 1:
        at = far(at, position % C.PAGE, stride_slot)
    # 16 bytes a copy: the compiler cannot know it of a sum that it has not made.
    rows = gl.multiple_of(at.to(tensor.dtype), 16)
    col = first_of(C, part) + gl.arange(0, width_of(C, part), gl.SliceLayout(0, spread))
    copy_rows(place, rows[:, None] + col[None, :], mask=here[:, None] & (col < C.HEADS * C.HEAD_DIM)[None, :])


@gluon.jit
def gather_tiles(k_source, v_source, ring, slot, phase, page_row, head, first, stop, kv_len, C: gl.constexpr):
    """Bring tiles [first, stop) of one request; columns without a key become zeros, and nothing is read for them."""
    asked: gl.constexpr = asked_of(C.BLOCK_N, C.BLOCK_D, gl.num_warps())
    coming = ask_for_pages(page_row, first, kv_len, C, asked)
    for tile in range(first, stop):
        pages = pages_of(coming, C)
        # Ids of the next tile travel while this one's keys do, and while the ring is full.
        coming = ask_for_pages(page_row, gl.minimum(tile + 1, stop - 1), kv_len, C, asked)
        mbarrier.wait(ring.k.free.index(slot), phase ^ 1)
        copy_keys(k_source, ring.k.tiles, slot, pages, tile, head, kv_len, C)
        async_copy.mbarrier_arrive(ring.k.full.index(slot), increment_count=False)
        mbarrier.wait(ring.v.free.index(slot), phase ^ 1)
        copy_keys(v_source, ring.v.tiles, slot, pages, tile, head, kv_len, C)
        async_copy.mbarrier_arrive(ring.v.full.index(slot), increment_count=False)
        slot, phase = next_slot(slot, phase, C.STAGES)
    return slot, phase
