"""Packed rows of q and of out on their way between memory and a warp group: 64 at a time, through its shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .constants import moving_of
from .names import reinterpret, thread_barrier


@gluon.jit
def inverse_of(group):
    """What `apart` multiplies by where it would divide by the group."""
    return ((1 << 23) + group - 1) // group


@gluon.jit
def apart(packed, group, inverse):
    """Query row and head of packed rows, counted from a row's first head; exact below ``2**23 / group`` of them.

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
def load_rows(q, begin, packed, live, head, group, inverse, stride_row, stride_head, C: gl.constexpr):
    """64 packed rows of q on their way to registers, two values in one; dead ones and padding are zero."""
    col = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, moving_of(C)))
    own, there = columns_of(packed, col, group, inverse, C)
    pointers = rows_between(q, begin, packed, own, head, group, inverse, stride_row, stride_head, C)
    values = gl.load(pointers, mask=live[:, None] & there, other=0.0).to(gl.int16, bitcast=True).to(gl.int32)
    low, high = gl.split(gl.reshape(values, [values.shape[0], C.BLOCK_D // 2, 2]))
    return (low & 0xFFFF) | (high << 16)


@gluon.jit
def put_rows(own, queries):
    """Rows of q from registers into a warp group's shared memory."""
    thread_barrier()
    pairs: gl.constexpr = gl.NVMMASharedLayout.get_default_for([own.shape[0], own.shape[1] // 2], gl.int32)
    reinterpret(own, gl.int32, [own.shape[0], own.shape[1] // 2], pairs).store(queries)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def bring_rows(own, q, begin, packed, live, head, group, inverse, stride_row, stride_head, C: gl.constexpr):
    """64 packed rows of q into a warp group's shared memory."""
    queries = load_rows(q, begin, packed, live, head, group, inverse, stride_row, stride_head, C)
    put_rows(own, queries)


@gluon.jit
def store_rows(room, acc, out, begin, packed, live, head, group, inverse, stride_row, stride_head, C: gl.constexpr):
    """A warp group's result to out, through the shared memory that q no longer needs: whole sectors are written."""
    col = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, moving_of(C)))
    thread_barrier()
    room.store(acc.to(out.dtype.element_ty))
    thread_barrier()
    own, there = columns_of(packed, col, group, inverse, C)
    pointers = rows_between(out, begin, packed, own, head, group, inverse, stride_row, stride_head, C)
    gl.store(pointers, room.load(moving_of(C)), mask=live[:, None] & there)
