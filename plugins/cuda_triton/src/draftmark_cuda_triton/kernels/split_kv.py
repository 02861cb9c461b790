"""Split-KV on the device: the KV tiles of a batch form one line, which is cut into equal splits.

    request 0          1              2                 The tiles of all requests in one line. Piece c of it is
    ├──────────────┼───────┼──────────────────────┤     worked on by one program per (KV head, row tile), side by
    │     0     │     1     │     2     │     3    │     side in time: together they read whole token rows, which
                                                        is what DRAM likes. Wherever a cut falls inside a request,
                                                        its parts are merged later.

A ragged batch is as balanced as an even one: a piece leaves at most two unfinished requests, and what a request
costs beside its tiles (filling the pipeline, the masked tile, storing) counts as OVERHEAD_TILES tiles more.
Everything derives from prefix_lens on the device: no host length, no sync (sglang#26738 cannot happen).
"""

import triton.language as tl

from .inline import inline


@inline
def kv_tile_range(prefix_len, tail_len, window_left, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr):
    """First tile that any row of a request can see, and the one past the last; (0, 0) where it has no row."""
    end = (prefix_len + tail_len + BLOCK_N - 1) // BLOCK_N
    if RAGGED:
        end = tl.where(tail_len > 0, end, 0)
    if WINDOW:
        # The shallowest row stands at L, and no row sees further left than it.
        return tl.minimum(tl.maximum(prefix_len - window_left, 0) // BLOCK_N, end), end
    else:
        return end * 0, end


@inline
def kv_tile_stop(
    tile, tiles_left, end, prefix_len, tail_len, rows, last_row, BLOCK_N: tl.constexpr, BLOCK_TAIL: tl.constexpr
):  # fmt: skip
    """One past the last tile that a row tile folds of a piece that begins at `tile` and has `tiles_left` more.

    Parents stand before children, so that rows of a tree, as those of a chain, see no slot behind their own: what lies
    behind `last_row`'s is left out, but for one tile of a piece that has nothing else. Rows of a block see each other.
    """
    stop = tl.minimum(tile + tiles_left, end)
    if BLOCK_TAIL:
        return stop
    else:
        seen = prefix_len + tail_len - rows + tl.minimum(last_row, rows - 1) + 1
        return tl.minimum(stop, tl.maximum((seen + BLOCK_N - 1) // BLOCK_N, tile + 1))


@inline
def request_rows(q_indptr, request, q_len, tail_len, RAGGED: tl.constexpr):
    """First row, rows and tail slots of a request; in a ragged batch from the device, and its tail is its rows."""
    if RAGGED:
        begin = tl.load(q_indptr + request)
        rows = tl.load(q_indptr + request + 1) - begin
        return begin, rows, rows
    else:
        return request * q_len, q_len, tail_len


@inline
def row_tile_kv_range(
    m, rows, prefix_len, group, window_left, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr
):
    """First tile that row tile m of a ragged causal request sees, and the one past the last."""
    highest = tl.minimum((m * BLOCK_M + BLOCK_M - 1) // group, rows - 1)
    first = highest * 0
    if WINDOW:
        first = tl.maximum(prefix_len + m * BLOCK_M // group - window_left, 0) // BLOCK_N
    return first, (prefix_len + highest + BLOCK_N) // BLOCK_N


@inline
def split_order(index, tiles, tiles_per_request):
    """Which of so many row tiles is so far along the line that is cut, if requests have `tiles_per_request` each; or 1,
    or 0, where they differ.

    The last ones of all requests come first, then those before them: pieces that begin at the same keys of a request,
    for its row tiles, read them at the same time.
    """
    tiles_per_request = tl.maximum(tiles_per_request, 1)
    requests = tl.maximum(tiles // tiles_per_request, 1)
    return tl.where(index < tiles, index % requests * tiles_per_request + index // requests, index)


@inline
def request_overhead(tail_len, OVERHEAD_TILES: tl.constexpr, RAGGED: tl.constexpr):
    """What a request costs beside its tiles; nothing where it has no row."""
    if RAGGED:
        return tl.where(tail_len > 0, OVERHEAD_TILES, 0)
    else:
        return OVERHEAD_TILES


@inline
def split_range(total, index, num_splits):
    """Start and length of piece `index` of a line of `total`: equal pieces, the first of which have one tile more."""
    base = total // num_splits
    extra = total - base * num_splits
    return index * base + tl.minimum(index, extra), base + tl.where(index < extra, 1, 0)


@inline
def splits_started_before(place, total, num_splits):
    """How many pieces start before a place of the line: `split_range`, the other way round."""
    base = total // num_splits
    extra = total - base * num_splits
    longer = extra * (base + 1)
    later = extra + (place - longer + base - 1) // tl.maximum(base, 1)
    return tl.where(place <= longer, (place + base) // (base + 1), later)
