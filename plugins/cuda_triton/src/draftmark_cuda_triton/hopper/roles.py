"""The two roles inside a program: one warp fetches keys, warp groups of 64 packed rows fold them in.

    fetch (1 warp)        ring of STAGES tiles of BLOCK_N keys          fold (1 to 3 warp groups)
    page ids ─► boxes ──► │ K0 V0 │ K1 V1 │ K2 V2 │ … │ ───────────►    64 rows each, the same tiles
                          full ─────────────────────────────►           s = q·kᵀ, softmax, acc += p·v
                          ◄───────────────────────────── empty

The fetcher runs ahead over the ends of requests, so a ring is never drained between them. A box is a page, or
BLOCK_N rows of a larger one, and 128 bytes of a head: four pages of 16 fill a tile as one page of 64 does.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .mask import hide
from .names import async_load, reinterpret, thread_barrier

FETCH_REGISTERS = gl.constexpr(40)
WIDEN_REGISTERS = gl.constexpr(96)


@gluon.jit
def next_slot(slot, phase, STAGES: gl.constexpr):
    """The next slot of the ring; its phase flips at the end."""
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def fetch_tiles(
    k_source, v_source, ring, slot, phase, page_row, head, first, stop, kv_len, num_pages, PAGE: gl.constexpr,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, BLOCK_D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring tiles [first, stop) of one request; boxes behind its last key bring zeros and no bytes."""
    k_ring, v_ring, k_full, v_full, empty = ring
    BOXES: gl.constexpr = BLOCK_N // BOX
    WIDTH: gl.constexpr = k_source.block_shape[3]
    PARTS: gl.constexpr = BLOCK_D // WIDTH
    BYTES: gl.constexpr = BLOCK_N * BLOCK_D * k_source.dtype.primitive_bitwidth // 8
    for tile in range(first, stop):
        # Before the wait, so that page ids travel while the ring is full.
        pages = ()
        rows = ()
        for b in gl.static_range(BOXES):
            position = tile * BLOCK_N + b * BOX
            here = position < kv_len
            page = gl.load(page_row + gl.where(here, position // PAGE, 0))
            pages = pages + (gl.where(here, page, num_pages),)  # type: ignore[assignment]  # noqa: RUF005
            row = position % PAGE + gl.minimum(kv_len - position, BOX) - BOX
            rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(empty.index(slot), phase ^ 1)
        k_boxes = reinterpret(k_ring.index(slot), k_source.dtype, [PARTS * BOXES, 1, BOX, 1, WIDTH], k_source.layout)
        v_boxes = reinterpret(v_ring.index(slot), v_source.dtype, [PARTS * BOXES, 1, BOX, 1, WIDTH], v_source.layout)
        mbarrier.expect(k_full.index(slot), BYTES)
        mbarrier.expect(v_full.index(slot), BYTES)
        for b in gl.static_range(BOXES):
            for part in gl.static_range(PARTS):
                async_load(
                    k_source, [pages[b], rows[b], head, part * WIDTH], k_full.index(slot),
                    k_boxes.index(part * BOXES + b),
                )  # fmt: skip
        for b in gl.static_range(BOXES):
            for part in gl.static_range(PARTS):
                async_load(
                    v_source, [pages[b], rows[b], head, part * WIDTH], v_full.index(slot),
                    v_boxes.index(part * BOXES + b),
                )  # fmt: skip
        slot, phase = next_slot(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def soft_cap(s, scale, cap):
    """``cap · tanh(s · scale / cap)`` in base-2 units; see `kernels.tile.soft_cap`."""
    e = gl.exp2(s * (scale * 2.0 / cap))
    return cap * (1.0 - 2.0 / (e + 1.0))


@gluon.jit
def widened(x, dtype: gl.constexpr):
    """e4m3 to `dtype`, exactly. To bf16 by moving the bits, four at a time: exponents are 120 too small afterwards,
    which a product with 2**120 makes up for, for subnormals too. e4m3's NaN becomes 480.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """
            {
                .reg .b32 low, high, sign, factor;
                mov.b32 factor, 0x7B807B80;
                prmt.b32 low, $2, 0, 0x1404;
                prmt.b32 high, $2, 0, 0x3424;
                and.b32 sign, low, 0x80008000;
                shr.b32 low, low, 4;
                lop3.b32 low, low, 0x07F007F0, sign, 0xEA;
                mul.rn.bf16x2 $0, low, factor;
                and.b32 sign, high, 0x80008000;
                shr.b32 high, high, 4;
                lop3.b32 high, high, 0x07F007F0, sign, 0xEA;
                mul.rn.bf16x2 $1, high, factor;
            }
            """,
            "=r,=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return x.to(dtype)


@gluon.jit
def widen_tiles(
    narrow, ring, near, near_phase, slot, phase, first, stop, BLOCK_D: gl.constexpr, DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring e4m3 tiles [first, stop) to the rows' dtype: once a tile, whatever the number of rows."""
    k_narrow, v_narrow, k_came, v_came, left = narrow
    k_ring, v_ring, k_full, v_full, empty = ring
    # Eight threads write one row of 128 bytes: 16 values a thread would put two of them on each bank.
    spread: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [gl.num_warps(), 1], [1, 0])
    for _ in range(first, stop):
        mbarrier.wait(k_came.index(near), near_phase)
        keys = widened(k_narrow.index(near).load(spread), k_ring.dtype)
        mbarrier.wait(empty.index(slot), phase ^ 1)
        k_ring.index(slot).store(keys)
        fence_async_shared()
        mbarrier.arrive(k_full.index(slot), count=1)
        mbarrier.wait(v_came.index(near), near_phase)
        values = widened(v_narrow.index(near).load(spread), v_ring.dtype)
        v_ring.index(slot).store(values)
        fence_async_shared()
        mbarrier.arrive(v_full.index(slot), count=1)
        mbarrier.arrive(left.index(near), count=1)
        near, near_phase = next_slot(near, near_phase, DEPTH)
        slot, phase = next_slot(slot, phase, STAGES)
    return near, near_phase, slot, phase


@gluon.jit
def capped(s, scale, cap, CAP: gl.constexpr):
    """Scores under the soft cap, if there is one; they are masked afterwards, for the cap of -inf is finite."""
    if CAP:
        s = soft_cap(s, scale, cap)
    return s


@gluon.jit
def weigh(s, scale, top, mass, CAP: gl.constexpr):
    """Scores to weights, and the rows' new maximum and sum; `shrink` is what the old sums are multiplied by."""
    unit = scale
    if CAP:
        unit = 1.4426950408889634
    new_top = gl.maximum(top, gl.max(s, 1) * unit)
    # A row that has seen no key yet: -inf - -inf would be NaN.
    pivot = gl.where(new_top == float("-inf"), 0.0, new_top)
    p = gl.exp2(s * unit - pivot[:, None])
    shrink = gl.exp2(top - pivot)
    return p, shrink, new_top, mass * shrink + gl.sum(p, 1)


@gluon.jit
def wait_for_tile(full, phase, GATHERED: gl.constexpr):
    """Wait until a tile is in its slot, and may be read by a product.

    GATHERED: threads wrote it as they write shared memory themselves (cp.async); a product reads it as the copy engine
    does. Only a fence orders the two, on either side of the barrier.
    """
    mbarrier.wait(full, phase)
    if GATHERED:
        fence_async_shared()


@gluon.jit
def fold_tiles(
    acc, top, mass, q, ring, slot, phase, first, clear, stop, prefix_len, tail_len, slot_of_row, row_position, row_live,
    row_words, depths, mask_words, window_left, scale, cap,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, TAIL: gl.constexpr, WINDOW: gl.constexpr, CAP: gl.constexpr,
    STAGES: gl.constexpr, OVERLAP: gl.constexpr, GATHERED: gl.constexpr, scores: gl.constexpr,
    output: gl.constexpr,
):  # fmt: skip
    """Fold tiles [first, stop) into the state of 64 rows; they differ in what they see from tile `clear` on.

    OVERLAP: a tile's scores are asked for before the last tile's values are folded in, and its softmax runs beside
    that; otherwise the tensor cores wait for the softmax, unless another warp group has work for them.
    """
    k_ring, v_ring, k_full, v_full, empty = ring
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    zero = gl.full([q.shape[0], BLOCK_N], 0.0, gl.float32, scores)
    if OVERLAP:
        wait_for_tile(k_full.index(slot), phase, GATHERED)
        s = warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = capped(warpgroup_mma_wait(0, deps=[s]), scale, cap, CAP)
        if first >= clear:
            s = hide(
                s, first, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words,
                window_left, BLOCK_N, BOX, TAIL, WINDOW, scores,
            )  # fmt: skip
        p, shrink, top, mass = weigh(s, scale, top, mass, CAP)
        weights = gl.convert_layout(p.to(q.dtype), operand)
        for tile in range(first + 1, stop):
            next, next_phase = next_slot(slot, phase, STAGES)
            wait_for_tile(k_full.index(next), next_phase, GATHERED)
            s = warpgroup_mma(q, k_ring.index(next).permute((1, 0)), zero, use_acc=False, is_async=True)
            wait_for_tile(v_full.index(slot), phase, GATHERED)
            folded = warpgroup_mma(weights, v_ring.index(slot), acc, is_async=True)
            s = capped(warpgroup_mma_wait(1, deps=[s]), scale, cap, CAP)
            if tile >= clear:
                s = hide(
                    s, tile, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words,
                    window_left, BLOCK_N, BOX, TAIL, WINDOW, scores,
                )  # fmt: skip
            p, shrink, top, mass = weigh(s, scale, top, mass, CAP)
            acc, _ = warpgroup_mma_wait(0, deps=[folded, weights])
            mbarrier.arrive(empty.index(slot), count=1)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, output))[:, None]
            weights = gl.convert_layout(p.to(q.dtype), operand)
            slot = next
            phase = next_phase
        wait_for_tile(v_full.index(slot), phase, GATHERED)
        acc = warpgroup_mma(weights, v_ring.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    else:
        for tile in range(first, stop):
            wait_for_tile(k_full.index(slot), phase, GATHERED)
            s = warpgroup_mma(q, k_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = capped(warpgroup_mma_wait(0, deps=[s]), scale, cap, CAP)
            if tile >= clear:
                s = hide(
                    s, tile, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words,
                    window_left, BLOCK_N, BOX, TAIL, WINDOW, scores,
                )  # fmt: skip
            p, shrink, top, mass = weigh(s, scale, top, mass, CAP)
            weights = gl.convert_layout(p.to(q.dtype), operand)
            acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, output))[:, None]
            wait_for_tile(v_full.index(slot), phase, GATHERED)
            acc = warpgroup_mma(weights, v_ring.index(slot), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, STAGES)
    return acc, top, mass, slot, phase


@gluon.jit
def rows_between(tensor, begin, packed, head, group, stride_row, stride_head, BLOCK_D: gl.constexpr,
                 moving: gl.constexpr):  # fmt: skip
    """Pointers ``[64, BLOCK_D]`` to packed rows of q or out."""
    col = gl.arange(0, BLOCK_D, gl.SliceLayout(0, moving))
    at = (begin + packed // group).to(gl.int64) * stride_row + (head * group + packed % group) * stride_head
    return tensor + at[:, None] + col[None, :]


@gluon.jit
def bring_rows(own, q, begin, packed, live, head, group, stride_row, stride_head, HEAD_DIM: gl.constexpr,
               BLOCK_D: gl.constexpr, moving: gl.constexpr):  # fmt: skip
    """64 packed rows of q into a warp group's shared memory; dead ones and padding are zero."""
    col = gl.arange(0, BLOCK_D, gl.SliceLayout(0, moving))
    there = live[:, None] & (col < HEAD_DIM)[None, :]
    pointers = rows_between(q, begin, packed, head, group, stride_row, stride_head, BLOCK_D, moving)
    queries = gl.load(pointers, mask=there, other=0.0)
    thread_barrier()
    own.store(queries)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def store_rows(own, acc, out, begin, packed, live, head, group, stride_row, stride_head, HEAD_DIM: gl.constexpr,
               BLOCK_D: gl.constexpr, moving: gl.constexpr):  # fmt: skip
    """A warp group's result to out, through the shared memory that q no longer needs: whole sectors are written."""
    col = gl.arange(0, BLOCK_D, gl.SliceLayout(0, moving))
    thread_barrier()
    own.store(acc.to(out.dtype.element_ty))
    thread_barrier()
    pointers = rows_between(out, begin, packed, head, group, stride_row, stride_head, BLOCK_D, moving)
    gl.store(pointers, own.load(moving), mask=live[:, None] & (col < HEAD_DIM)[None, :])


@gluon.jit
def sink_mass(sinks, heads, live, top):
    """What the sinks of query heads add to the mass of rows; see `kernels.tile.sink_mass`."""
    sink = gl.load(sinks + heads, mask=live, other=float("-inf")) * 1.4426950408889634
    return gl.exp2(sink - gl.where(top == float("-inf"), 0.0, top))
