"""Packed GQA rows, (query row, head of the group): indices, and the load of 64 rows of q into shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .config import num_column_parts, part_offset, part_width, row_io_layout
from .gluon_compat import reinterpret, thread_barrier


@gluon.jit
def reciprocal(group):
    """What `split_packed_row` multiplies by where it would divide by the group."""
    return ((1 << 23) + group - 1) // group


@gluon.jit
def opaque_zero():
    """A zero that the compiler does not know: what a loop works out from it is not kept in registers from before."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def split_packed_row(packed, group, inv_group):
    """Query row and head of packed rows, counted from a row's first head; exact below ``256 · group`` of them, and so
    within a row tile.

    A division by what only a launch knows takes a dozen instructions, for each row a thread has, in each request.
    """
    row = packed * inv_group >> 23
    return row, packed - row * group


@gluon.jit
def head_columns(packed, col, group, inv_group, CFG: gl.constexpr, COLUMNS: gl.constexpr = 1):
    """Which elements of its own head a row's columns of a tile are, and which of them there are.

    Where two KV heads are beside each other, a row has elements in its own one's columns, and zeros in the other's.

    Args:
        COLUMNS: the dimension that columns are; rows are the other.
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
    """Pointers ``[rows, columns]`` to elements `own` of packed rows of q or out, counted from row `begin`.

    What strides are multiples of decides how many elements a thread moves at once.
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
    """64 packed rows of a part's columns on their way to registers, two values in one."""
    WIDTH: gl.constexpr = part_width(CFG, part)
    packed, own, live = packed_cells(first, count, group, inv_group, part, CFG)
    pointers = row_pointers(q, begin, packed, own, head, group, inv_group, stride_row, stride_head, CFG)
    values = gl.load(pointers, mask=live, other=0.0).to(gl.int16, bitcast=True).to(gl.int32)
    low, high = gl.split(gl.reshape(values, [64, WIDTH // 2, 2]))
    return (low & 0xFFFF) | (high << 16)


@gluon.jit
def packed_cells(first, count, group, inv_group, part: gl.constexpr, CFG: gl.constexpr):
    """64 packed rows from `first` on, a part's columns as elements of their heads, and which of both there are."""
    WIDTH: gl.constexpr = part_width(CFG, part)
    packed = first + gl.arange(0, 64, gl.SliceLayout(1, row_io_layout(WIDTH)))
    col = part_offset(CFG, part) + gl.arange(0, WIDTH, gl.SliceLayout(0, row_io_layout(WIDTH)))
    own, live = head_columns(packed, col, group, inv_group, CFG)
    return packed, own, (packed < count)[:, None] & live


@gluon.jit
def load_q(q, begin, first, count, head, group, inv_group, stride_row, stride_head, CFG: gl.constexpr):
    """64 packed rows of q on their way to registers, by the parts of a tile's columns.

    Args:
        first: the first of them. count: how many there are, from row `begin` on; others, and padding, are zero.
    """
    queries = ()
    for part in gl.static_range(num_column_parts(CFG)):
        rows = load_q_part(q, begin, first, count, head, group, inv_group, stride_row, stride_head, part, CFG)
        queries = queries + (rows,)  # type: ignore[assignment]  # noqa: RUF005
    return queries


@gluon.jit
def store_q_part_smem(smem, queries):
    """A part's columns of them."""
    pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for(queries.shape, gl.int32)
    reinterpret(smem, gl.int32, queries.shape, pairs).store(queries)


@gluon.jit
def store_q_smem(smem, queries, CFG: gl.constexpr):
    """Rows of q from registers into a warp group's shared memory."""
    thread_barrier()
    for part in gl.static_range(num_column_parts(CFG)):
        store_q_part_smem(smem[part], queries[part])
    fence_async_shared()
    thread_barrier()


@gluon.jit
def load_q_to_smem(smem, q, begin, first, count, head, group, inv_group, stride_row, stride_head, CFG: gl.constexpr):
    """64 packed rows of q into a warp group's shared memory; as of `load_q`."""
    store_q_smem(smem, load_q(q, begin, first, count, head, group, inv_group, stride_row, stride_head, CFG), CFG)
