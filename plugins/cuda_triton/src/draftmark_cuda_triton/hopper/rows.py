"""Packed rows of q and of out on their way between memory and a warp group: 64 at a time, through its shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .constants import first_of, moving_of, parts_of, width_of
from .names import reinterpret, thread_barrier


@gluon.jit
def inverse_of(group):
    """What `apart` multiplies by where it would divide by the group."""
    return ((1 << 23) + group - 1) // group


@gluon.jit
def nought():
    """A zero that the compiler does not know: what a loop works out from it is not kept in registers from before."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def apart(packed, group, inverse):
    """Query row and head of packed rows, counted from a row's first head; exact below ``256 · group`` of them, and so
    within a row tile.

    A division by what only a launch knows takes a dozen instructions, for each row a thread has, in each request.
    """
    row = packed * inverse >> 23
    return row, packed - row * group


@gluon.jit
def columns_of(packed, col, group, inverse, C: gl.constexpr, COLUMNS: gl.constexpr = 1):
    """Which elements of its own head a row's columns of a tile are, and which of them there are.

    Where two KV heads are beside each other, a row has elements in its own one's columns, and zeros in the other's.

    Args:
        COLUMNS: the dimension that columns are; rows are the other.
    """
    own = gl.expand_dims(col, 1 - COLUMNS)
    if C.HEADS == 2:
        _, member = apart(packed, group, inverse)
        own = own - gl.expand_dims((2 * member >= group).to(gl.int32) * C.HEAD_DIM, COLUMNS)
        return own, (own >= 0) & (own < C.HEAD_DIM)
    else:
        return own, own < C.HEAD_DIM


@gluon.jit
def rows_between(tensor, begin, packed, own, head, group, inverse, stride_row, stride_head, C: gl.constexpr):
    """Pointers ``[rows, columns]`` to elements `own` of packed rows of q or out, counted from row `begin`.

    What strides are multiples of decides how many elements a thread moves at once.
    """
    STEP: gl.constexpr = C.STEP
    row, member = apart(packed, group, inverse)
    at = gl.multiple_of(row * stride_row + member * stride_head, STEP)
    first = tensor + gl.multiple_of(begin.to(gl.int64) * stride_row, STEP)
    first += gl.multiple_of(head * group * stride_head, STEP)
    return first + (at[:, None] + own)


@gluon.jit
def load_part(
    q, begin, first, count, head, group, inverse, stride_row, stride_head, part: gl.constexpr, C: gl.constexpr
):  # fmt: skip
    """64 packed rows of a part's columns on their way to registers, two values in one."""
    WIDTH: gl.constexpr = width_of(C, part)
    packed, own, there = cells_of(first, count, group, inverse, part, C)
    pointers = rows_between(q, begin, packed, own, head, group, inverse, stride_row, stride_head, C)
    values = gl.load(pointers, mask=there, other=0.0).to(gl.int16, bitcast=True).to(gl.int32)
    low, high = gl.split(gl.reshape(values, [64, WIDTH // 2, 2]))
    return (low & 0xFFFF) | (high << 16)


@gluon.jit
def cells_of(first, count, group, inverse, part: gl.constexpr, C: gl.constexpr):
    """64 packed rows from `first` on, a part's columns as elements of their heads, and which of both there are."""
    WIDTH: gl.constexpr = width_of(C, part)
    packed = first + gl.arange(0, 64, gl.SliceLayout(1, moving_of(WIDTH)))
    col = first_of(C, part) + gl.arange(0, WIDTH, gl.SliceLayout(0, moving_of(WIDTH)))
    own, there = columns_of(packed, col, group, inverse, C)
    return packed, own, (packed < count)[:, None] & there


@gluon.jit
def load_rows(q, begin, first, count, head, group, inverse, stride_row, stride_head, C: gl.constexpr):
    """64 packed rows of q on their way to registers, by the parts of a tile's columns.

    Args:
        first: the first of them. count: how many there are, from row `begin` on; others, and padding, are zero.
    """
    queries = ()
    for part in gl.static_range(parts_of(C)):
        rows = load_part(q, begin, first, count, head, group, inverse, stride_row, stride_head, part, C)
        queries = queries + (rows,)  # type: ignore[assignment]  # noqa: RUF005
    return queries


@gluon.jit
def put_part(own, queries):
    """A part's columns of them."""
    pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for(queries.shape, gl.int32)
    reinterpret(own, gl.int32, queries.shape, pairs).store(queries)


@gluon.jit
def put_rows(own, queries, C: gl.constexpr):
    """Rows of q from registers into a warp group's shared memory."""
    thread_barrier()
    for part in gl.static_range(parts_of(C)):
        put_part(own[part], queries[part])
    fence_async_shared()
    thread_barrier()


@gluon.jit
def bring_rows(own, q, begin, first, count, head, group, inverse, stride_row, stride_head, C: gl.constexpr):
    """64 packed rows of q into a warp group's shared memory; as of `load_rows`."""
    put_rows(own, load_rows(q, begin, first, count, head, group, inverse, stride_row, stride_head, C), C)


@gluon.jit
def store_rows(room, acc, out, begin, first, count, head, group, inverse, stride_row, stride_head, C: gl.constexpr):
    """A warp group's result to out, through the shared memory that q no longer needs: whole sectors are written."""
    thread_barrier()
    for part in gl.static_range(parts_of(C)):
        room[part].store(acc[part].to(out.dtype.element_ty))
    thread_barrier()
    for part in gl.static_range(parts_of(C)):
        packed, own, there = cells_of(first, count, group, inverse, part, C)
        pointers = rows_between(out, begin, packed, own, head, group, inverse, stride_row, stride_head, C)
        gl.store(pointers, room[part].load(moving_of(width_of(C, part))), mask=there)
