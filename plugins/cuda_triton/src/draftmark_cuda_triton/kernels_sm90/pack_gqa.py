"""Packed GQA rows, each a (query row, head of the group) pair: index arithmetic, and the load of q to shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .config import num_column_parts, part_offset, part_width, row_io_layout
from .gluon_compat import reinterpret, thread_barrier


@gluon.jit
def reciprocal(group):
    """Return 2**23 / group, rounded up: `split_packed_row` multiplies by it instead of dividing by `group`."""
    return ((1 << 23) + group - 1) // group


@gluon.jit
def opaque_zero():
    """Return a zero that the compiler cannot fold, so values derived from it are not hoisted out of a loop."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def split_packed_row(packed, group, inv_group):
    """Return the query row and the head within the group of packed row indices.

    Exact for packed < 256 · group and packed · group < 2**23, which includes every row tile. An integer division by a
    launch argument would take a dozen instructions for each row of a thread, in each request.
    """
    row = packed * inv_group >> 23
    return row, packed - row * group


@gluon.jit
def head_columns(packed, col, group, inv_group, CFG: gl.constexpr, COLUMNS: gl.constexpr = 1):
    """Return the element of its head that each (packed row, tile column) holds, and False where it holds none.

    With two KV heads in a tile, a row has elements in the columns of its own KV head, and zeros in the columns of the
    other KV head.

    Args:
        COLUMNS: dimension of the columns in the result; the rows are the other dimension.
    """
    own = gl.expand_dims(col, 1 - COLUMNS)
    if CFG.KV_HEADS_PER_TILE == 2:
        _, head_in_group = split_packed_row(packed, group, inv_group)
        own = own - gl.expand_dims((2 * head_in_group >= group).to(gl.int32) * CFG.HEAD_DIM, COLUMNS)
        return own, (own >= 0) & (own < CFG.HEAD_DIM)
    else:
        return own, own < CFG.HEAD_DIM


@gluon.jit
def row_pointers(tensor, begin, packed, own, head, group, inv_group, stride_row, stride_head, CFG: gl.constexpr):
    """Return pointers ``[rows, columns]`` to the elements `own` of packed rows of q or out; row 0 is `begin`.

    The declared alignment of the strides (STRIDE_ALIGN) decides the number of elements that one instruction moves.
    """
    STRIDE_ALIGN: gl.constexpr = CFG.STRIDE_ALIGN
    row, head_in_group = split_packed_row(packed, group, inv_group)
    at = gl.multiple_of(row * stride_row + head_in_group * stride_head, STRIDE_ALIGN)
    first = tensor + gl.multiple_of(begin.to(gl.int64) * stride_row, STRIDE_ALIGN)
    first += gl.multiple_of(head * group * stride_head, STRIDE_ALIGN)
    return first + (at[:, None] + own)


@gluon.jit
def load_q_part(
    q, begin, first, count, head, group, inv_group, stride_row, stride_head, part: gl.constexpr, CFG: gl.constexpr
):  # fmt: skip
    """Load 64 packed rows of one column part of q into registers, two 16-bit values in each."""
    WIDTH: gl.constexpr = part_width(CFG, part)
    packed, own, live = packed_cells(first, count, group, inv_group, part, CFG)
    pointers = row_pointers(q, begin, packed, own, head, group, inv_group, stride_row, stride_head, CFG)
    values = gl.load(pointers, mask=live, other=0.0).to(gl.int16, bitcast=True).to(gl.int32)
    low, high = gl.split(gl.reshape(values, [64, WIDTH // 2, 2]))
    return (low & 0xFFFF) | (high << 16)


@gluon.jit
def packed_cells(first, count, group, inv_group, part: gl.constexpr, CFG: gl.constexpr):
    """Return the indices of 64 packed rows from `first` on, each column's element index, and a mask of live cells."""
    WIDTH: gl.constexpr = part_width(CFG, part)
    packed = first + gl.arange(0, 64, gl.SliceLayout(1, row_io_layout(WIDTH)))
    col = part_offset(CFG, part) + gl.arange(0, WIDTH, gl.SliceLayout(0, row_io_layout(WIDTH)))
    own, live = head_columns(packed, col, group, inv_group, CFG)
    return packed, own, (packed < count)[:, None] & live


@gluon.jit
def load_q(q, begin, first, count, head, group, inv_group, stride_row, stride_head, CFG: gl.constexpr):
    """Load 64 packed rows of q into registers, one tensor for each column part.

    Args:
        first: index of the first packed row, relative to row `begin`.
        count: number of packed rows from row `begin` on; rows after them, and padding columns, are zero.
    """
    queries = ()
    for part in gl.static_range(num_column_parts(CFG)):
        rows = load_q_part(q, begin, first, count, head, group, inv_group, stride_row, stride_head, part, CFG)
        queries = queries + (rows,)  # type: ignore[assignment]  # noqa: RUF005
    return queries


@gluon.jit
def store_q_part_smem(smem, queries):
    """Store one column part of q to shared memory; each 32-bit element holds two 16-bit values."""
    pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for(queries.shape, gl.int32)
    reinterpret(smem, gl.int32, queries.shape, pairs).store(queries)


@gluon.jit
def store_q_smem(smem, queries, CFG: gl.constexpr):
    """Store rows of q from registers to a warp group's shared memory, with a proxy fence for wgmma."""
    thread_barrier()
    for part in gl.static_range(num_column_parts(CFG)):
        store_q_part_smem(smem[part], queries[part])
    fence_async_shared()
    thread_barrier()


@gluon.jit
def load_q_to_smem(smem, q, begin, first, count, head, group, inv_group, stride_row, stride_head, CFG: gl.constexpr):
    """Load 64 packed rows of q into a warp group's shared memory; arguments as in `load_q`."""
    store_q_smem(smem, load_q(q, begin, first, count, head, group, inv_group, stride_row, stride_head, CFG), CFG)
