"""Packed rows of a row tile and their masks in `latent_swap_ab`. Registers are few, so each use computes them again."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .decode_verify import first_rows_of_tile, row_tile_start
from .latent_rs_mask import RowTile
from .latent_swap_ab_config import swapped_layout
from .mask import TREE, visible_keys
from .pack_gqa import opaque_zero, reciprocal, split_packed_row
from .split_kv import request_rows


class TailMask(NamedTuple):
    """Holds the arguments of the kernel that describe masks.

    Attributes:
        mask: pointer to the packed masks of all rows.
        depth: pointer to the depths of the tokens of all tails.
        words: int32 words of a row's mask.
        window_left: tokens before its own position that a row sees.
        q_len, tail_len: numbers of rows and tail tokens of each request; 0 in a ragged batch.
    """

    mask: gl.tensor
    depth: gl.tensor
    words: gl.tensor
    window_left: gl.tensor
    q_len: gl.tensor
    tail_len: gl.tensor


@gluon.jit
def locate_tile(request, prefix_lens, q_indptr, q_len, tail_len, group, CFG: gl.constexpr):
    """Return the `RowTile` of this CTA in a request, without rows and heads; nothing stays in registers for it."""
    request += opaque_zero()
    inv_group = reciprocal(group)
    begin, rows, tail_slots = request_rows(q_indptr, request, q_len, tail_len)
    packed, first_row = row_tile_start(request, first_rows_of_tile(group, CFG), CFG)
    head_offset = packed - first_row * group
    first_row_offset, _ = split_packed_row(head_offset, group, inv_group)
    last_row_offset, _ = split_packed_row(head_offset + CFG.BLOCK_M - 1, group, inv_group)
    return RowTile(
        prefix_len=gl.load(prefix_lens + request), tail_slots=tail_slots, begin=begin, rows=rows, packed=packed,
        first_row=first_row, first_row_offset=first_row_offset, last_row_offset=last_row_offset, row=packed,
        head=packed,
    )  # fmt: skip


@gluon.jit
def packed_rows(at, group, layout: gl.constexpr, CFG: gl.constexpr):
    """Return the query row and the head of each packed row; computed anew, because registers are few."""
    own = opaque_zero() + gl.arange(0, CFG.BLOCK_M, layout)
    row, head = split_packed_row(at.packed - at.first_row * group + own, group, reciprocal(group))
    return at.first_row + row, head


@gluon.jit
def hide_unseen(s, tile, request, at, tail, group, CFG: gl.constexpr):
    """Set scores ``[keys, rows]`` to -inf where rows do not see keys (`mma_fp8_swap_ab.apply_mask_transposed`)."""
    M: gl.constexpr = CFG.BLOCK_M
    rows: gl.constexpr = gl.BlockedLayout([1, M // 2], [M // 4, 128 // M], [4, 1], [1, 0])
    row, _ = packed_rows(at, group, gl.SliceLayout(1, rows), CFG)
    row_live = row < at.rows
    slot_of_row = at.tail_slots - at.rows + row
    row_position = at.prefix_len + slot_of_row
    depths = tail.depth + gl.where(tail.q_len == 0, at.begin, request * tail.tail_len)
    if CFG.TAIL_KIND == TREE and CFG.WINDOW:
        row_position = at.prefix_len + gl.load(depths + slot_of_row, mask=row_live, other=0)
    words = tail.mask + (at.begin + row).to(gl.int64) * tail.words
    seen = visible_keys(
        tile, at.prefix_len, at.tail_slots, slot_of_row, row_position, row_live, words, depths, tail.words,
        tail.window_left, CFG, rows,
    )  # fmt: skip
    seen = gl.convert_layout(gl.permute(seen.to(gl.int8), (1, 0)), swapped_layout(CFG)) != 0
    return gl.where(seen, s, float("-inf"))
