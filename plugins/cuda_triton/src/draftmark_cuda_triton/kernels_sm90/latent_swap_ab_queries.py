"""Rows of q of `latent_swap_ab`: the loaded rows become two float16 operands, in the same shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .config import row_io_layout
from .gluon_compat import reinterpret, thread_barrier
from .latent_swap_ab_mask import packed_rows
from .latent_swap_ab_memory import query_full, query_operands


@gluon.jit
def live_rows(at, group, WIDTH: gl.constexpr, CFG: gl.constexpr):
    """Return True for packed rows of the request and False for others, in the layout of q with WIDTH columns."""
    row, _ = packed_rows(at, group, gl.SliceLayout(1, row_io_layout(WIDTH)), CFG)
    return row < at.rows


@gluon.jit
def largest_element(rows, live):
    """Return the largest finite magnitude in the blocks of live rows of q.

    Infinities do not count: a row with an infinity keeps it, but must not change the scale of the other rows.
    """
    LAYOUT: gl.constexpr = row_io_layout(rows.shape[2])
    most = gl.full([rows.shape[1], rows.shape[2]], 0.0, gl.float32, LAYOUT)
    for i in range(rows.shape[0]):
        most = gl.maximum(most, gl.abs(rows.index(i).load(LAYOUT).to(gl.float32)))
    most = gl.max(most, 1)
    return gl.max(gl.where(live & (most < float("inf")), most, 0.0), 0)


@gluon.jit
def convert_queries(source, rows, live, factor):
    """Replace blocks of q by their operands times a factor (`query_operands`), in the order of `upcast_k`."""
    ROWS: gl.constexpr = source.shape[1]
    WIDTH: gl.constexpr = source.shape[2]
    LAYOUT: gl.constexpr = row_io_layout(source.shape[2])
    for i in range(source.shape[0]):
        block = source.index(i).load(LAYOUT).to(gl.float32)
        block = gl.where(live[:, None], block * factor, 0.0)
        pairs = block.to(gl.float16).reshape([ROWS, WIDTH // 4, 2, 2]).permute((0, 1, 3, 2))
        low, high = gl.split(pairs)
        thread_barrier()
        query_operands(rows).index(2 * i).store(low.reshape([ROWS, WIDTH // 2]))
        query_operands(rows).index(2 * i + 1).store(high.reshape([ROWS, WIDTH // 2]))


@gluon.jit
def take_queries(memory, at, group, turn, DTYPE: gl.constexpr, CFG: gl.constexpr):
    """Convert the packed rows of q in shared memory to two float16 operands; return the factor of their scores.

    A power of two scales all rows of the tile, as in `mma_fp8_swap_ab.load_q_fp16`.
    """
    mbarrier.wait(query_full(memory, CFG), turn)
    values = loaded_rows(memory.queries, DTYPE)
    live = live_rows(at, group, 64, CFG)
    largest = largest_element(values, live)
    if CFG.REST_DIM > 0:
        rests = loaded_rows(memory.query_rests, DTYPE)
        rest_live = live_rows(at, group, CFG.REST_DIM, CFG)
        largest = gl.maximum(largest, largest_element(rests, rest_live))
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 15)
    factor = ((268 - exponent) << 23).to(gl.float32, bitcast=True)
    convert_queries(values, memory.queries, live, factor)
    if CFG.REST_DIM > 0:
        convert_queries(rests, memory.query_rests, rest_live, factor)
    fence_async_shared()
    thread_barrier()
    return ((exponent - 14) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def loaded_rows(rows, DTYPE: gl.constexpr):
    """Return blocks of q with the dtype in which they are loaded."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([rows.shape[1], rows.shape[2]], DTYPE)
    return reinterpret(rows, DTYPE, [rows.shape[0], rows.shape[1], rows.shape[2]], layout)
