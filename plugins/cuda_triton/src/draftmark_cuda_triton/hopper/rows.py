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
def rows_between(tensor, begin, packed, col, head, group, inverse, stride_row, stride_head):
    """Pointers ``[rows, columns]`` to packed rows of q or out, counted from row `begin`."""
    row, member = apart(packed, group, inverse)
    at = row * stride_row + member * stride_head
    first = tensor + begin.to(gl.int64) * stride_row + head * group * stride_head
    return first + (at[:, None] + col[None, :])


@gluon.jit
def load_rows(q, begin, packed, live, head, group, inverse, stride_row, stride_head, C: gl.constexpr):
    """64 packed rows of q on their way to registers, two values in one; dead ones and padding are zero."""
    col = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, moving_of(C)))
    there = live[:, None] & (col < C.HEAD_DIM)[None, :]
    pointers = rows_between(q, begin, packed, col, head, group, inverse, stride_row, stride_head)
    values = gl.load(pointers, mask=there, other=0.0).to(gl.int16, bitcast=True).to(gl.int32)
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
def store_rows(own, acc, out, begin, packed, live, head, group, inverse, stride_row, stride_head, C: gl.constexpr):
    """A warp group's result to out, through the shared memory that q no longer needs: whole sectors are written."""
    col = gl.arange(0, C.BLOCK_D, gl.SliceLayout(0, moving_of(C)))
    thread_barrier()
    own.store(acc.to(out.dtype.element_ty))
    thread_barrier()
    pointers = rows_between(out, begin, packed, col, head, group, inverse, stride_row, stride_head)
    gl.store(pointers, own.load(moving_of(C)), mask=live[:, None] & (col < C.HEAD_DIM)[None, :])
