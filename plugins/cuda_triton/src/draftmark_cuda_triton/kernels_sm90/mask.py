"""Visibility of keys for packed rows. The request's last TMA box is placed so that it ends with the last stored key.

box of 16 rows:  . . . . . . . . . k k k k k k k      A tile has BLOCK_N / BOX_KEYS boxes, each inside one page. The
                 ── zeros ──────── ─ 7 keys ────      box with the request's last key ends with that key. TMA
                                                      writes zeros for rows before the page's first row.

So no data after the last key is read (0 · NaN is NaN, vllm#43961), and no value must be cleared afterwards. If the page
begins before the box, the box's first rows hold earlier keys of the request instead of zeros. These are finite, and
masked here.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import scores_layout

CAUSAL, TREE = gl.constexpr(0), gl.constexpr(1)


class RowMask(NamedTuple):
    """Visibility of one request's keys for 64 packed rows; int32 unless noted.

    Attributes:
        prefix_len, tail_len: numbers of keys in the prefix, and in the tail (the request's new tokens).
        slot_of_row: ``[64]``, index of each row in the tail.
        row_position: ``[64]``, position of each row's token in the sequence.
        row_live: bool ``[64]``, False for padding rows of the tile.
        row_words: trees only: pointers ``[64]`` to the packed mask of each row.
        depths: trees only: pointer to the depths of the tail's tokens.
        mask_words: trees only: int32 words of a row's mask.
        window_left: tokens before its own position that a row sees.
        max_position: largest `row_position`.
        first_masked_tile: first key tile that needs a mask, because rows can see different keys in it or because the
            request's keys do not fill it.
    """

    prefix_len: gl.tensor
    tail_len: gl.tensor
    slot_of_row: gl.tensor
    row_position: gl.tensor
    row_live: gl.tensor
    row_words: gl.tensor
    depths: gl.tensor
    mask_words: gl.tensor
    window_left: gl.tensor
    max_position: gl.tensor
    first_masked_tile: gl.tensor


@gluon.jit
def key_positions(tile, kv_len, BLOCK_N: gl.constexpr, BOX_KEYS: gl.constexpr, cols: gl.constexpr):
    """Return each column's key position, and False for columns without a key of this tile (`last_box`)."""
    column = gl.arange(0, BLOCK_N, cols)
    start = tile * BLOCK_N + column // BOX_KEYS * BOX_KEYS
    position = start + column % BOX_KEYS - BOX_KEYS + gl.minimum(kv_len - start, BOX_KEYS)
    return position, position >= start


@gluon.jit
def tree_bits(
    tile, prefix_len, kv_len, slot_of_row, row_live, row_words, mask_words, CFG: gl.constexpr, scores: gl.constexpr
):  # fmt: skip
    """Return the tree mask as bool ``[rows, BLOCK_N]``; columns outside the tail are False.

    For each row, two adjacent mask words are shifted so that bit c belongs to column c of a run. A run is 32 columns,
    or one box if that is smaller. This needs registers for each row instead of each (row, key). Words outside the mask
    read as zero.
    """
    RUN: gl.constexpr = 32 if CFG.BOX_KEYS > 32 else CFG.BOX_KEYS
    column = gl.arange(0, CFG.BLOCK_N, gl.SliceLayout(0, scores))
    bits = gl.full([slot_of_row.shape[0], CFG.BLOCK_N], 0, gl.int32, scores)
    for i in gl.static_range(CFG.BLOCK_N // RUN):
        start = tile * CFG.BLOCK_N + i * RUN // CFG.BOX_KEYS * CFG.BOX_KEYS
        first = start - CFG.BOX_KEYS + gl.minimum(kv_len - start, CFG.BOX_KEYS) + i * RUN % CFG.BOX_KEYS - prefix_len
        index = (first >> 5) + slot_of_row * 0
        low = gl.load(row_words + index, mask=row_live & (index >= 0) & (index < mask_words), other=0)
        high = gl.load(row_words + index + 1, mask=row_live & (index >= -1) & (index + 1 < mask_words), other=0)
        both = (high.to(gl.int64) << 32) | (low.to(gl.int64) & 0xFFFFFFFF)
        word = (both >> (first & 31).to(gl.int64)).to(gl.int32)
        bits = gl.where((column // RUN == i)[None, :], word[:, None], bits)
    return ((bits >> (column % RUN)[None, :]) & 1) != 0


@gluon.jit
def visible_keys(
    tile, prefix_len, tail_len, slot_of_row, row_position, row_live, row_words, depths, mask_words, window_left,
    CFG: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """Return bool ``[rows, BLOCK_N]``: True where a packed row sees a key (`kernels.tile.visible_keys`)."""
    kv_len = prefix_len + tail_len
    position, stored = key_positions(tile, kv_len, CFG.BLOCK_N, CFG.BOX_KEYS, gl.SliceLayout(0, scores))
    slot = position - prefix_len
    seen = stored[None, :] & (slot_of_row == slot_of_row)[:, None]
    if CFG.TAIL_KIND == TREE:
        bits = tree_bits(tile, prefix_len, kv_len, slot_of_row, row_live, row_words, mask_words, CFG, scores)
        seen = seen & ((slot < 0)[None, :] | bits)
    if CFG.TAIL_KIND == CAUSAL:
        seen = seen & (slot[None, :] <= slot_of_row[:, None])
    if CFG.WINDOW:
        key_position = position
        if CFG.TAIL_KIND == TREE:
            depth = gl.load(depths + slot, mask=stored & (slot >= 0) & (slot < tail_len), other=0)
            key_position = gl.where(slot < 0, position, prefix_len + depth)
        seen = seen & (row_position[:, None] - key_position[None, :] <= window_left)
    return seen


@gluon.jit
def low_bits(n):
    """Return a word with the lowest n bits set, for n in 0 to 32; a negative n counts as 0."""
    return gl.inline_asm_elementwise(
        "{ .reg .u32 width; max.s32 width, $1, 0; bmsk.clamp.b32 $0, 0, width; }", "=r,r", [n], dtype=gl.int32,
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def last_box(tile, row_mask, CFG: gl.constexpr):
    """Return the number of keys left from the tile's start on, and the hole (columns without a key) in its last box.

    A box that is not full is loaded so that its keys come last; its first columns are the hole. Returns: number of
    keys; first column of the hole; width of the hole, 0 if there is none.
    """
    rest = row_mask.prefix_len + row_mask.tail_len - tile * CFG.BLOCK_N
    return rest, rest & -CFG.BOX_KEYS, gl.where(rest < CFG.BLOCK_N, -rest & (CFG.BOX_KEYS - 1), 0)


@gluon.jit
def first_tail_slot(tile, run: gl.constexpr, prefix_len, hole, width, CFG: gl.constexpr):
    """Return the tail slot of the first of a run of 32 columns, without counting a hole inside the run (`last_box`)."""
    first = tile * CFG.BLOCK_N + run * 32 - prefix_len
    if CFG.BOX_KEYS >= 32:
        first -= gl.where(run * 32 >= hole, width, 0)
    return first


@gluon.jit
def load_mask_words(tile, row_mask, CFG: gl.constexpr):
    """Load two mask words of each row for every 32 columns of a tile."""
    _, hole, width = last_box(tile, row_mask, CFG)
    words = ()
    for run in gl.static_range(CFG.BLOCK_N // 32):
        at = (first_tail_slot(tile, run, row_mask.prefix_len, hole, width, CFG) >> 5) + row_mask.slot_of_row * 0
        there = row_mask.row_live & (at >= 0) & (at < row_mask.mask_words)
        low = gl.load(row_mask.row_words + at, mask=there, other=0)
        there = row_mask.row_live & (at >= -1) & (at + 1 < row_mask.mask_words)
        high = gl.load(row_mask.row_words + at + 1, mask=there, other=0)
        words = words + (low, high)  # type: ignore[assignment]  # noqa: RUF005
    return words


@gluon.jit
def mask_by_depth(s, tile, row_mask, CFG: gl.constexpr):
    """Set scores of tree tokens to -inf where their depth lies outside the row's sliding window."""
    kv_len = row_mask.prefix_len + row_mask.tail_len
    position, stored = key_positions(tile, kv_len, CFG.BLOCK_N, CFG.BOX_KEYS, gl.SliceLayout(0, scores_layout(CFG)))
    slot = position - row_mask.prefix_len
    depth = gl.load(row_mask.depths + slot, mask=stored & (slot >= 0) & (slot < row_mask.tail_len), other=1 << 30)
    least = row_mask.row_position - row_mask.prefix_len - row_mask.window_left
    return gl.where(depth[None, :] < least[:, None], float("-inf"), s)


@gluon.jit
def first_tile_in_window(max_position, window_left, CFG: gl.constexpr):
    """Return a key tile from which on no key is outside the window of any row at a position up to `max_position`."""
    return gl.where(max_position > window_left, (max_position - window_left) // CFG.BLOCK_N + 1, 0)


@gluon.jit
def needs_mask(tile, row_mask, CFG: gl.constexpr):
    """Return True if rows can see different keys of a tile: at the diagonal, in the tail, or at a window's start."""
    found = tile >= row_mask.first_masked_tile
    if CFG.WINDOW:
        found = found | (tile < first_tile_in_window(row_mask.max_position, row_mask.window_left, CFG))
    return found


@gluon.jit
def visible_words(tile, row_mask, CFG: gl.constexpr):
    """Return the columns of a tile that each tree row sees, as bits: bit c of word i is column 32i + c."""
    rest, hole, width = last_box(tile, row_mask, CFG)
    loaded = load_mask_words(tile, row_mask, CFG)
    words = ()
    none = row_mask.slot_of_row * 0
    # This is the window's start within the prefix. Windows over tail tokens are applied by depth, in `mask_by_depth`.
    least = gl.minimum(row_mask.row_position - row_mask.prefix_len - row_mask.window_left, 0)
    end = (rest + CFG.BOX_KEYS - 1) & -CFG.BOX_KEYS
    for run in gl.static_range(CFG.BLOCK_N // 32):
        first = first_tail_slot(tile, run, row_mask.prefix_len, hole, width, CFG)
        word = funnel_shift(loaded[2 * run], loaded[2 * run + 1], none + first) | low_bits(-first)
        if CFG.WINDOW:
            word = word & ~low_bits(least - first)
        before = low_bits(hole - run * 32)
        if CFG.BOX_KEYS < 32:
            word = (word & before) | ((word << (none + width)) & ~before)
        word = word & low_bits(end - run * 32) & (before | ~low_bits(hole + width - run * 32))
        words = words + (word[:, None],)  # type: ignore[assignment]  # noqa: RUF005
    return words


@gluon.jit
def funnel_shift(low, high, by):
    """Return 32 bits of the 64 bits high:low, starting at bit ``by % 32``."""
    return gl.inline_asm_elementwise(
        "shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, by], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def thread_columns(count):
    """Return the columns of a thread's `count` scores in wgmma's layout, relative to its first column 2 · (lane % 4).

    A thread holds scores of two rows: element i belongs to the second row if i & 2.
    """
    return [i // 4 * 8 + i % 2 for i in range(count)]


FIRST_COLUMN_ASM = gl.constexpr("mov.u32 own, %laneid; and.b32 own, own, 3; shl.b32 own, own, 1;")
"""PTX that computes a thread's first column, 2 · (lane % 4)."""


@gluon.constexpr_function
def mask_constraints(count, others):
    """Return asm constraints for `count` scores in and out, and for `count` values of each of `others` integers."""
    return ",".join(["=f"] * count + ["f"] * count + ["r"] * (count * others))


@gluon.constexpr_function
def mask_by_words_asm(count):
    """Return PTX that sets scores to -inf where their mask bit is 0; the mask words follow the scores as operands.

    A warp skips the code if its rows see the whole tile.
    """
    code = ["{", ".reg .pred out;", ".reg .b32 own, bit, all;", FIRST_COLUMN_ASM.value, "mov.b32 all, -1;"]
    for run in range(count // 16):
        for row in (0, 1):
            word, args = f"word{run}{row}", f"${count * (2 + run) + 2 * row}"
            code += [f".reg .b32 {word};", f"and.b32 all, all, {args};", f"shr.u32 {word}, {args}, own;"]
    code += [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    code += ["setp.ne.s32 out, all, -1;", "vote.sync.any.pred out, out, 0xffffffff;", "@!out bra.uni SEEN;"]
    for i, column in enumerate(thread_columns(count)):
        code += [f"and.b32 bit, word{column // 32}{i // 2 % 2}, {1 << column % 32};", "setp.eq.s32 out, bit, 0;"]
        code += [f"selp.f32 ${i}, 0fFF800000, ${i}, out;"]
    return "\n".join([*code, "SEEN:", "}"])


@gluon.constexpr_function
def mask_by_bounds_asm(count, windowed):
    """Return PTX that sets scores to -inf right of `last`, left of `least` (if windowed), and in the hole (`last_box`).

    A warp skips the comparisons with the bounds if its rows see the whole tile. It skips those with the hole if the
    tile has none.
    """
    last, least, hole, width = (count * (2 + i) for i in range(4))
    columns = thread_columns(count)
    code = ["{", ".reg .pred out;", ".reg .s32 own, at, hole, last0, last1, least0, least1;", FIRST_COLUMN_ASM.value]
    for row in (0, 1):
        code += [f"sub.s32 last{row}, ${last + 2 * row}, own;", f"sub.s32 least{row}, ${least + 2 * row}, own;"]
    code += [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    code += [f"setp.lt.s32 out, last0, {columns[-1]};", f"setp.lt.or.s32 out, last1, {columns[-1]}, out;"]
    if windowed:
        code += ["setp.gt.or.s32 out, least0, 0, out;", "setp.gt.or.s32 out, least1, 0, out;"]
    code += ["vote.sync.any.pred out, out, 0xffffffff;", "@!out bra.uni SEEN;"]
    for i, column in enumerate(columns):
        row = i // 2 % 2
        code += [f"setp.lt.s32 out, last{row}, {column};"]
        code += [f"setp.gt.or.s32 out, least{row}, {column}, out;"] if windowed else []
        code += [f"selp.f32 ${i}, 0fFF800000, ${i}, out;"]
    code += ["SEEN:", f"setp.eq.s32 out, ${width}, 0;", "@out bra.uni FULL;", f"sub.s32 hole, ${hole}, own;"]
    for i, column in enumerate(columns):
        if i % 4 < 2:
            code += [f"sub.s32 at, {column}, hole;", f"setp.lt.u32 out, at, ${width};"]
            code += [f"selp.f32 ${j}, 0fFF800000, ${j}, out;" for j in (i, i + 2)]
    return "\n".join([*code, "FULL:", "}"])


@gluon.jit
def shift_past_hole(column, hole, width):
    """Convert a column counted without the hole in the last box (`last_box`) to the actual column."""
    return gl.where(column >= hole, column + width, column)


@gluon.jit
def seen_keys(tile, row_mask, CFG: gl.constexpr):
    """Return the keys of a tile that rows see, for `hide_unseen`: mask words of a tree, or else bounds and the hole."""
    if CFG.TAIL_KIND == TREE:
        return visible_words(tile, row_mask, CFG)
    else:
        # The hole: the first columns of a last box that is not full. They hold zeros or earlier keys, and no key of
        # this tile.
        rest, hole, width = last_box(tile, row_mask, CFG)
        last = row_mask.slot_of_row * 0 + rest - 1
        if CFG.TAIL_KIND == CAUSAL:
            last = row_mask.slot_of_row + row_mask.prefix_len - tile * CFG.BLOCK_N
        last = shift_past_hole(last, hole, width)
        least = row_mask.slot_of_row * 0
        if CFG.WINDOW:
            first = row_mask.row_position - row_mask.window_left - tile * CFG.BLOCK_N
            least = shift_past_hole(first, hole, width)
        return last[:, None], least[:, None], hole, width


@gluon.jit
def hide_unseen(s, seen, CFG: gl.constexpr):
    """Set scores of keys that rows do not see to -inf."""
    OWN: gl.constexpr = s.shape[0] * s.shape[1] // 128
    if CFG.TAIL_KIND == TREE:
        return gl.inline_asm_elementwise(
            mask_by_words_asm(OWN), mask_constraints(OWN, CFG.BLOCK_N // 32), (s,) + seen, dtype=gl.float32,  # noqa: RUF005
            is_pure=True, pack=OWN,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            mask_by_bounds_asm(OWN, CFG.WINDOW), mask_constraints(OWN, 4), (s,) + seen, dtype=gl.float32,  # noqa: RUF005
            is_pure=True, pack=OWN,
        )  # fmt: skip


@gluon.jit
def hide_by_depth(s, tile, row_mask, CFG: gl.constexpr):
    """Set scores of tree tokens outside the window to -inf.

    This is rarely needed, since trees are rarely deeper than a window is wide.
    """
    if row_mask.max_position - row_mask.prefix_len > row_mask.window_left:
        s = mask_by_depth(s, tile, row_mask, CFG)
    return s


@gluon.jit
def apply_mask(s, tile, row_mask, CFG: gl.constexpr):
    """Set scores of a tile to -inf where a row does not see the key, as `visible_keys` defines.

    This takes a third of the instructions of `visible_keys`. In `visible_keys` each thread computes the column index of
    every score. Here the columns are immediate operands, relative to the thread's first column.
    """
    if needs_mask(tile, row_mask, CFG):
        s = hide_unseen(s, seen_keys(tile, row_mask, CFG), CFG)
        if CFG.WINDOW and CFG.TAIL_KIND == TREE:
            s = hide_by_depth(s, tile, row_mask, CFG)
    return s
