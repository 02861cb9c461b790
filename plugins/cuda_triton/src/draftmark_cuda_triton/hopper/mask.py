"""Which keys a packed row sees, where a tile's last box is aligned to the end of what a request has stored.

box of 16 rows:  . . . . . . . . . k k k k k k k      A tile is BLOCK_N / BOX boxes, each inside one page. The
                 ── zeros ──────── ─ 7 keys ────      box that holds the last key ends with it: what lies before
                                                      the page reads as zeros, so nothing that a page holds
behind the last key is ever read (0 · NaN is NaN, vllm#43961), and no value has to be cleared afterwards. Where
the page begins before the box, its other rows are keys that the request has; they are masked, and finite.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

CAUSAL, TREE = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def key_positions(tile, kv_len, BLOCK_N: gl.constexpr, BOX: gl.constexpr, cols: gl.constexpr):
    """Position of each column's key, and whether it is a key of this column's box at all."""
    column = gl.arange(0, BLOCK_N, cols)
    start = tile * BLOCK_N + column // BOX * BOX
    position = start + column % BOX - BOX + gl.minimum(kv_len - start, BOX)
    return position, position >= start


@gluon.jit
def tree_bits(
    tile, prefix_len, kv_len, slot_of_row, row_live, row_words, mask_words, BLOCK_N: gl.constexpr, BOX: gl.constexpr,
    scores: gl.constexpr,
):  # fmt: skip
    """bool ``[rows, BLOCK_N]``: the mask's bit of each column's slot, where it has one.

    Of each row two neighbouring words are shifted so that bit c is column c of a run: registers per row, not per
    (row, key). Words that do not exist read as zero.
    """
    RUN: gl.constexpr = 32 if BOX > 32 else BOX
    column = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
    bits = gl.full([slot_of_row.shape[0], BLOCK_N], 0, gl.int32, scores)
    for i in gl.static_range(BLOCK_N // RUN):
        start = tile * BLOCK_N + i * RUN // BOX * BOX
        first = start - BOX + gl.minimum(kv_len - start, BOX) + i * RUN % BOX - prefix_len
        index = (first >> 5) + slot_of_row * 0
        low = gl.load(row_words + index, mask=row_live & (index >= 0) & (index < mask_words), other=0)
        high = gl.load(row_words + index + 1, mask=row_live & (index >= -1) & (index + 1 < mask_words), other=0)
        both = (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)
        word = (both >> (first & 31).to(gl.int64)).to(gl.int32)
        bits = gl.where((column // RUN == i)[None, :], word[:, None], bits)
    return ((bits >> (column % RUN)[None, :]) & 1) != 0


@gluon.jit
def visible(
    tile, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words, window_left,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, TAIL: gl.constexpr, WINDOW: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """bool ``[rows, BLOCK_N]``: which keys of a tile each packed row sees; see `kernels.tile.visible`."""
    kv_len = prefix_len + tail_len
    position, stored = key_positions(tile, kv_len, BLOCK_N, BOX, gl.SliceLayout(0, scores))
    slot = position - prefix_len
    seen = stored[None, :] & (slot_of_row == slot_of_row)[:, None]
    if TAIL == TREE:
        bits = tree_bits(
            tile, prefix_len, kv_len, slot_of_row, row_live, row_words, mask_words, BLOCK_N, BOX, scores
        )  # fmt: skip
        seen = seen & ((slot < 0)[None, :] | bits)
    if TAIL == CAUSAL:
        seen = seen & (slot[None, :] <= slot_of_row[:, None])
    if WINDOW:
        key_position = position
        if TAIL == TREE:
            depth = gl.load(depths + slot, mask=stored & (slot >= 0) & (slot < tail_len), other=0)
            key_position = gl.where(slot < 0, position, prefix_len + depth)
        seen = seen & (row_position[:, None] - key_position[None, :] <= window_left)
    return seen


@gluon.jit
def hide(
    s, tile, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words, window_left,
    BLOCK_N: gl.constexpr, BOX: gl.constexpr, TAIL: gl.constexpr, WINDOW: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """Scores of a tile, -inf where a row does not see the key."""
    seen = visible(
        tile, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words, window_left,
        BLOCK_N, BOX, TAIL, WINDOW, scores,
    )  # fmt: skip
    return gl.where(seen, s, float("-inf"))
