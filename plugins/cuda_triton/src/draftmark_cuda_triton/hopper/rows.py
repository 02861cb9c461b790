"""Packed rows of q and of out on their way between memory and a warp group: 64 at a time, through its shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from .names import thread_barrier


@gluon.jit
def rows_between(tensor, begin, packed, head, group, stride_row, stride_head, BLOCK_D: gl.constexpr,
                 moving: gl.constexpr):  # fmt: skip
    """Pointers ``[64, BLOCK_D]`` to packed rows of q or out."""
    col = gl.arange(0, BLOCK_D, gl.SliceLayout(0, moving))
    at = (begin + packed // group).to(gl.int64) * stride_row + (head * group + packed % group) * stride_head
    return tensor + at[:, None] + col[None, :]


@gluon.jit
def load_rows(q, begin, packed, live, head, group, stride_row, stride_head, HEAD_DIM: gl.constexpr,
              BLOCK_D: gl.constexpr, moving: gl.constexpr):  # fmt: skip
    """64 packed rows of q on their way to registers; dead ones and padding are zero."""
    col = gl.arange(0, BLOCK_D, gl.SliceLayout(0, moving))
    there = live[:, None] & (col < HEAD_DIM)[None, :]
    pointers = rows_between(q, begin, packed, head, group, stride_row, stride_head, BLOCK_D, moving)
    return gl.load(pointers, mask=there, other=0.0)


@gluon.jit
def put_rows(own, queries):
    """Rows of q from registers into a warp group's shared memory."""
    thread_barrier()
    own.store(queries)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def bring_rows(own, q, begin, packed, live, head, group, stride_row, stride_head, HEAD_DIM: gl.constexpr,
               BLOCK_D: gl.constexpr, moving: gl.constexpr):  # fmt: skip
    """64 packed rows of q into a warp group's shared memory."""
    put_rows(own, load_rows(q, begin, packed, live, head, group, stride_row, stride_head, HEAD_DIM, BLOCK_D, moving))


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
