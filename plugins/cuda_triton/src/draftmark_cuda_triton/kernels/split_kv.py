"""Split-KV on the device: the key tiles of a batch form one sequence, which is divided into equal splits.

    request 0          1              2                 The key tiles of all requests form one sequence. Each
    ├──────────────┼───────┼──────────────────────┤     split has one program per (KV head, row tile). These run
    │     0     │     1     │     2     │     3    │     at the same time and together read whole token rows, as
                                                        DRAM prefers. If a request lies in several splits, its
                                                        partial results are combined afterwards.

So the splits of a ragged batch are as equal as those of a uniform batch. At most two requests of a split, the first and
the last, also have parts in other splits. The fixed cost of a request (filling the pipeline, the masked tile, the
store) counts as OVERHEAD_TILES further key tiles. Everything derives from prefix_lens on the device, without host
lengths and without a sync (sglang#26738).
"""

import triton.language as tl

from .inline import inline


@inline
def kv_tile_range(prefix_len, tail_len, window_left, block_n, WINDOW: tl.constexpr):
    """Return the key tiles [first, end) that any row of a request can see; (0, 0) if it has no rows."""
    end = tl.where(tail_len > 0, (prefix_len + tail_len + block_n - 1) // block_n, 0)
    if WINDOW:
        # Every row is at position L (prefix_len) or later, so no row's window begins before L - window_left.
        return tl.minimum(tl.maximum(prefix_len - window_left, 0) // block_n, end), end
    else:
        return end * 0, end


@inline
def kv_tile_stop(
    tile, tiles_left, end, prefix_len, tail_len, rows, last_row, BLOCK_N: tl.constexpr, BLOCK_TAIL: tl.constexpr
):  # fmt: skip
    """Return the end, exclusive, of the key tiles that a row tile processes in a split.

    A parent always precedes its children, so rows of trees and chains see no tail token after their own. Tiles after
    the token of `last_row` are skipped, but at least one tile is processed. Rows of a bidirectional block see the whole
    tail.

    Args:
        tile: first key tile of the request in the split.
        tiles_left: key tiles left in the split.
    """
    stop = tl.minimum(tile + tiles_left, end)
    if BLOCK_TAIL:
        return stop
    else:
        seen = prefix_len + tail_len - rows + tl.minimum(last_row, rows - 1) + 1
        return tl.minimum(stop, tl.maximum((seen + BLOCK_N - 1) // BLOCK_N, tile + 1))


@inline
def request_rows(q_indptr, request, q_len, tail_len, is_ragged):
    """Return a request's first row, its number of rows and its number of tail tokens.

    In a ragged batch they come from q_indptr on the device, and the tail consists of the request's rows.

    Args:
        is_ragged: a constant, or a value that the device computes.
    """
    begin = tl.where(is_ragged, tl.load(q_indptr + request, mask=is_ragged, other=0), request * q_len)
    rows = tl.where(is_ragged, tl.load(q_indptr + request + 1, mask=is_ragged, other=0) - begin, q_len)
    return begin, rows, tl.where(is_ragged, rows, tail_len)


@inline
def row_tile_kv_range(m, rows, prefix_len, group, window_left, block_m, block_n, WINDOW: tl.constexpr):
    """Return the key tiles [first, end) that row tile m of a ragged causal request sees."""
    highest = tl.minimum((m * block_m + block_m - 1) // group, rows - 1)
    first = highest * 0
    if WINDOW:
        first = tl.maximum(prefix_len + m * block_m // group - window_left, 0) // block_n
    return first, (prefix_len + highest + block_n) // block_n


@inline
def split_order(index, tiles, tiles_per_request):
    """Return the row tile at position `index` of the sequence that is divided into splits.

    The last row tiles of all requests come first, then the second to last ones, and so on. With this order all row
    tiles of a request are split at the same keys, and their CTAs read these keys at the same time.

    Args:
        tiles: number of row tiles.
        tiles_per_request: row tiles of each request if all have the same number; 1 or 0 otherwise.
    """
    tiles_per_request = tl.maximum(tiles_per_request, 1)
    requests = tl.maximum(tiles // tiles_per_request, 1)
    return tl.where(index < tiles, index % requests * tiles_per_request + index // requests, index)


@inline
def request_overhead(tail_len, OVERHEAD_TILES: tl.constexpr):
    """Return the fixed cost of a request in key tiles; 0 if it has no rows."""
    return tl.where(tail_len > 0, OVERHEAD_TILES, 0)


@inline
def split_range(total, index, num_splits):
    """Return start and length of split `index` of `total` key tiles; the first splits get one more if uneven."""
    base = total // num_splits
    extra = total - base * num_splits
    return index * base + tl.minimum(index, extra), base + tl.where(index < extra, 1, 0)


@inline
def splits_started_before(place, total, num_splits):
    """Return the number of splits that start before key tile `place` of the sequence: the inverse of `split_range`."""
    base = total // num_splits
    extra = total - base * num_splits
    longer = extra * (base + 1)
    later = extra + (place - longer + base - 1) // tl.maximum(base, 1)
    return tl.where(place <= longer, (place + base) // (base + 1), later)
