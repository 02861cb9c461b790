"""The fetching role for pages of any size: four warps copy keys one by one into the ring of `roles`, 16 bytes a thread.

    page table ─► one entry a lane ─► shuffled to the threads of its row ─► cp.async ─► │ K0 V0 │ K1 V1 │ …
      a tile ahead of its copies         16 threads have a row of 256 B                 full: all 128 threads

What the ring holds afterwards is what boxes of BLOCK_N rows would have put there: the same swizzled rows, and a tile
that ends with the last key. So masks and folds take this ring for one of pages of BLOCK_N tokens.

cp.async writes shared memory as ordinary stores do, and wgmma reads it as the copy engine does: a fold puts a fence
between the two, behind its wait (`roles.wait_for_tile`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .mask import key_positions
from .names import async_copy, copy_rows
from .roles import next_slot

GATHERERS = gl.constexpr(4)
"""Warps that gather: a warp group, which one fetching warp occupies as well."""
GATHER_THREADS = gl.constexpr(32 * GATHERERS.value)
"""What arrives at a barrier for a tile of K, or of V."""
GATHER_REGISTERS = gl.constexpr(72)
UNIT = gl.constexpr(8)
"""Elements of 16 bytes, in which strides are told: the compiler then knows that an address is a multiple of them."""


@gluon.constexpr_function
def spread_of(rows, width, warps):
    """Who copies which 16 bytes of a tile ``[rows, width]``: a row's threads are neighbours in a warp."""
    return gl.BlockedLayout([1, 8], [256 // width, width // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def asked_of(rows, width, warps):
    """Who asks for which of a tile's page ids: the lanes of a warp share out the rows that the warp will copy."""
    side_by_side = 256 // width
    lanes = [[side_by_side * warps * 2**i] for i in range((rows // (side_by_side * warps)).bit_length() - 1)]
    high = [[2**i] for i in range(side_by_side.bit_length() - 1)]
    lanes += [[0]] * (5 - len(lanes) - len(high)) + high
    warp_bases = [[side_by_side * 2**i] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([], lanes, warp_bases, [], [rows])


@gluon.jit
def ask_for_pages(page_row, tile, kv_len, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, asked: gl.constexpr):
    """Page id of each column's key; 0 where there is none."""
    position, here = key_positions(tile, kv_len, BLOCK_N, BLOCK_N, asked)
    return gl.load(page_row + position // PAGE, mask=here, other=0)


@gluon.jit
def rows_at(source, page, position, head, PAGE: gl.constexpr):
    """Offsets of keys, 64-bit: page · P passes 2**31 in a large pool (vllm#47671)."""
    _, stride_page, stride_slot, stride_head = source
    at = page.to(gl.int64) * stride_page + head.to(gl.int64) * stride_head
    if PAGE > 1:
        at += (position % PAGE).to(gl.int64) * stride_slot
    return at * UNIT


@gluon.jit
def gather_tiles(
    k_source, v_source, ring, slot, phase, page_row, head, first, stop, kv_len, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Bring tiles [first, stop) of one request; columns without a key become zeros, and nothing is read for them.

    Args:
        k_source, v_source: pointer to ``[pages, P, heads, dim]``, and its first three strides in units of 16 bytes.
    """
    k_ring, v_ring, k_full, v_full, empty = ring
    spread: gl.constexpr = spread_of(BLOCK_N, BLOCK_D, gl.num_warps())
    asked: gl.constexpr = asked_of(BLOCK_N, BLOCK_D, gl.num_warps())
    rows: gl.constexpr = gl.SliceLayout(1, spread)
    col = gl.arange(0, BLOCK_D, gl.SliceLayout(0, spread))
    pages = ask_for_pages(page_row, first, kv_len, PAGE, BLOCK_N, asked)
    for tile in range(first, stop):
        page = gl.convert_layout(pages, rows)
        # A tile ahead, so that ids travel while keys do and while the ring is full.
        pages = ask_for_pages(page_row, gl.minimum(tile + 1, stop - 1), kv_len, PAGE, BLOCK_N, asked)
        position, here = key_positions(tile, kv_len, BLOCK_N, BLOCK_N, rows)
        there = here[:, None] & (col < HEAD_DIM)[None, :]
        k_rows = k_source[0] + rows_at(k_source, page, position, head, PAGE)[:, None] + col[None, :]
        v_rows = v_source[0] + rows_at(v_source, page, position, head, PAGE)[:, None] + col[None, :]
        mbarrier.wait(empty.index(slot), phase ^ 1)
        copy_rows(k_ring.index(slot), k_rows, mask=there)
        async_copy.mbarrier_arrive(k_full.index(slot), increment_count=False)
        copy_rows(v_ring.index(slot), v_rows, mask=there)
        async_copy.mbarrier_arrive(v_full.index(slot), increment_count=False)
        slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase
