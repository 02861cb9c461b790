"""KV tile ranges of a request and of a split; the same formulas as `kernels.split_kv`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = gl.constexpr(2)


@gluon.jit
def request_rows(q_indptr, request, q_len, tail_len, RAGGED: gl.constexpr):
    """Return a request's first row and its numbers of rows and tail tokens (`kernels.split_kv.request_rows`)."""
    begin, rows, tail_slots = request * q_len, q_len, tail_len
    if RAGGED:
        begin = gl.load(q_indptr + request)
        rows = gl.load(q_indptr + request + 1) - begin
        tail_slots = rows
    return begin, rows, tail_slots


@gluon.jit
def kv_tile_range(prefix_len, tail_len, window_left, CFG: gl.constexpr):
    """Return the key tiles [first, end) of a request (`kernels.split_kv.kv_tile_range`)."""
    end = (prefix_len + tail_len + CFG.BLOCK_N - 1) // CFG.BLOCK_N
    if CFG.RAGGED:
        end = gl.where(tail_len > 0, end, 0)
    first = end * 0
    if CFG.WINDOW:
        first = gl.minimum(gl.maximum(prefix_len - window_left, 0) // CFG.BLOCK_N, end)
    return first, end


@gluon.jit
def first_visible_key(prefix_len, window_left, CFG: gl.constexpr):
    """Return the first key that any row of a request sees (`kernels.tile.first_visible_key`)."""
    first = prefix_len * 0
    if CFG.WINDOW:
        first = gl.maximum(prefix_len - window_left, 0)
    return first


@gluon.jit
def kv_tile_stop(tile, tiles_left, end, prefix_len, tail_len, rows, last_row, CFG: gl.constexpr):
    """Return the end, exclusive, of the key tiles that a row tile processes in a split (`kernels.split_kv`)."""
    stop = gl.minimum(tile + tiles_left, end)
    if CFG.TAIL_KIND != BLOCK:
        seen = prefix_len + tail_len - rows + gl.minimum(last_row, rows - 1) + 1
        stop = gl.minimum(stop, gl.maximum((seen + CFG.BLOCK_N - 1) // CFG.BLOCK_N, tile + 1))
    return stop


@gluon.jit
def request_overhead(tail_len, CFG: gl.constexpr):
    """Return the fixed cost of a request, in key tiles (`kernels.split_kv.request_overhead`)."""
    cost = CFG.OVERHEAD_TILES
    if CFG.RAGGED:
        cost = gl.where(tail_len > 0, CFG.OVERHEAD_TILES, 0)
    return cost
