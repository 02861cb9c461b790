"""Masks of `latent_rs`, computed before the scores of a tile.

The rows of q and the scores leave the softmax warp group few registers. So the row and its visible keys are computed
again for each masked tile, and before its scores.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import scores_layout
from .decode_verify import first_rows_of_tile, row_tile_start
from .mask import CAUSAL, TREE, RowMask, first_tile_in_window
from .pack_gqa import opaque_zero, reciprocal, split_packed_row
from .split_kv import BLOCK, request_rows


class RowTile(NamedTuple):
    """Holds a request and 64 packed rows of it; int32.

    Attributes:
        prefix_len, tail_slots, begin, rows: lengths of prefix and tail, first row in the batch, number of rows.
        packed: index of the first packed row in the request.
        first_row, first_row_offset, last_row_offset: query row that the row tile begins in, and the first and last
            query row relative to it.
        row, head: ``[64]``, query row and head of each packed row.
    """

    prefix_len: gl.tensor
    tail_slots: gl.tensor
    begin: gl.tensor
    rows: gl.tensor
    packed: gl.tensor
    first_row: gl.tensor
    first_row_offset: gl.tensor
    last_row_offset: gl.tensor
    row: gl.tensor
    head: gl.tensor


@gluon.jit
def own_rows(CFG: gl.constexpr):
    """Return ``[64]`` row indices 0 to 63, computed anew from the thread's index: `gl.arange` stays in registers.

    In wgmma's layout, a thread has row ``tid % 32 // 4`` of each half of its warp's 16 rows.
    """
    zeros = gl.full([64], 0, gl.int32, gl.SliceLayout(1, scores_layout(CFG)))
    return gl.inline_asm_elementwise(
        """
        {
            .reg .u32 tid;
            mov.u32 tid, %tid.x;
            bfe.u32 $0, tid, 2, 3;
            bfe.u32 $1, tid, 5, 2;
            shl.b32 $1, $1, 4;
            add.u32 $0, $0, $1;
            add.u32 $1, $0, 8;
        }
        """,
        "=&r,=&r,r,r", [zeros], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def locate_rows(request, prefix_lens, q_indptr, q_len, tail_len, group, CFG: gl.constexpr):
    """Return the `RowTile` of this CTA in a request; no result of an earlier call stays in registers for it."""
    request += opaque_zero()
    inv_group = reciprocal(group)
    begin, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
    packed, first_row = row_tile_start(request, first_rows_of_tile(group, CFG), CFG)
    head_offset = packed - first_row * group
    first_row_offset, _ = split_packed_row(head_offset, group, inv_group)
    last_row_offset, _ = split_packed_row(head_offset + 63, group, inv_group)
    row, head = split_packed_row(head_offset + own_rows(CFG), group, inv_group)
    return RowTile(
        prefix_len=gl.load(prefix_lens + request), tail_slots=tail_slots, begin=begin, rows=rows, packed=packed,
        first_row=first_row, first_row_offset=first_row_offset, last_row_offset=last_row_offset, row=row + first_row,
        head=head,
    )  # fmt: skip


@gluon.jit
def unmasked_tiles(at, window_left, CFG: gl.constexpr):
    """Return the key tiles [first, end) in which every row sees every key."""
    kv_len = at.prefix_len + at.tail_slots
    keys_seen_by_all = at.prefix_len
    if CFG.TAIL_KIND == CAUSAL:
        keys_seen_by_all = kv_len - at.rows + at.first_row + at.first_row_offset + 1
    if CFG.TAIL_KIND == BLOCK:
        keys_seen_by_all = kv_len
    first = at.prefix_len * 0
    if CFG.WINDOW:
        # The token of a tree's row is at most at the position of its slot.
        last_position = kv_len - at.rows + gl.minimum(at.first_row + at.last_row_offset, at.rows - 1)
        first = first_tile_in_window(last_position, window_left, CFG)
    # The division rounds down, so a tile that extends past the last key is always masked.
    return first, gl.minimum(keys_seen_by_all, kv_len) // CFG.BLOCK_N


@gluon.jit
def row_mask_of(at, request, tail_mask, tail_depth, mask_words, q_len, tail_len, window_left, CFG: gl.constexpr):
    """Return the `RowMask` of a row tile."""
    row_live = at.row < at.rows
    slot_of_row = at.tail_slots - at.rows + at.row
    row_position = at.prefix_len + slot_of_row
    depths = tail_depth + gl.where(q_len == 0, at.begin, request * tail_len)
    max_position = at.prefix_len + at.tail_slots
    if CFG.TAIL_KIND == TREE and CFG.WINDOW:
        row_position = at.prefix_len + gl.load(depths + slot_of_row, mask=row_live, other=0)
        max_position = gl.max(row_position, 0)
    return RowMask(
        prefix_len=at.prefix_len, tail_len=at.tail_slots, slot_of_row=slot_of_row, row_position=row_position,
        row_live=row_live, row_words=tail_mask + (at.begin + at.row).to(gl.int64) * mask_words, depths=depths,
        mask_words=mask_words, window_left=window_left, max_position=max_position, first_masked_tile=at.rows,
    )  # fmt: skip


@gluon.jit
def everything_seen(CFG: gl.constexpr):
    """Return the bounds, or the mask words, of a tile in which every row sees every key (`mask.seen_keys`)."""
    rows = gl.full([64, 1], 0, gl.int32, scores_layout(CFG))
    if CFG.TAIL_KIND == TREE:
        words = ()
        for _ in gl.static_range(CFG.BLOCK_N // 32):
            words = words + (rows - 1,)  # type: ignore[assignment]  # noqa: RUF005
        return words
    else:
        return rows + CFG.BLOCK_N, rows, gl.to_tensor(CFG.BLOCK_N), gl.to_tensor(0)
