"""KV tile ranges of a request and of a split; the same formulas as `kernels.split_kv`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK = gl.constexpr(2)


@gluon.jit
def request_rows(q_indptr, request, q_len, tail_len):
    """Return a request's first row and its numbers of rows and tail tokens (`kernels.split_kv.request_rows`).

    One kernel serves uniform and ragged batches: q_len is 0 in a ragged batch. A uniform batch reads no memory here.
    """
    is_ragged = q_len == 0
    begin = gl.where(is_ragged, gl.load(q_indptr + request, mask=is_ragged, other=0), request * q_len)
    rows = gl.where(is_ragged, gl.load(q_indptr + request + 1, mask=is_ragged, other=0) - begin, q_len)
    return begin, rows, gl.where(is_ragged, rows, tail_len)


@gluon.jit
def kv_tile_range(prefix_len, tail_len, window_left, CFG: gl.constexpr):
    """Return the key tiles [first, end) of a request (`kernels.split_kv.kv_tile_range`)."""
    end = gl.where(tail_len > 0, (prefix_len + tail_len + CFG.BLOCK_N - 1) // CFG.BLOCK_N, 0)
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
    return gl.where(tail_len > 0, CFG.OVERHEAD_TILES, 0)
