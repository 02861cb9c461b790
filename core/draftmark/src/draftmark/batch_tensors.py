"""Specifications of the core's static batch tensors, for `BatchBuffers` and `draftmark size`. Does not import torch."""

from __future__ import annotations

from .buffers import BufferSpec, Role, Unit
from .geometry import Form, Geometry, Mode, StateGeometry, maximum


def batch_tensors(geometry: Geometry | StateGeometry, *, state: bool = False) -> list[BufferSpec]:
    """List every static tensor of a `ForwardBatch`, sized for the largest batch, in the order of the batch's fields.

    Args:
        state: the model also has layers with state; a `StateGeometry` implies it.
    """
    reqs, rows, words = geometry.max_reqs, geometry.max_rows_any, geometry.mask_words
    table = (reqs, geometry.max_pages_per_req)
    depth, depth_formula = reqs * geometry.max_tail, "max_reqs · max_tail"
    # RAGGED_VERIFY stores one depth per row, and its row budget may exceed max_reqs · max_tail.
    if Mode.RAGGED_VERIFY in geometry.modes:
        depth, depth_formula = maximum(depth, rows), "max(max_reqs · max_tail, max_rows_any)"
    tensors = [
        BufferSpec("prefix_lens", Role.KV_LENS, (reqs,), "int32", Unit.TOKENS, "max_reqs"),
        BufferSpec("page_table", Role.PAGE_TABLE, table, "int32", Unit.PAGES, "max_reqs × max_pages_per_req"),
        BufferSpec("positions", Role.POSITIONS, (rows,), "int64", Unit.TOKENS, "max_rows_any"),
        BufferSpec("mask", Role.TAIL_MASK, (rows, words), "int32", Unit.WORDS, "max_rows_any × mask_words"),
        BufferSpec("depth", Role.TAIL_DEPTH, (depth,), "int32", Unit.TOKENS, depth_formula),
    ]
    if Mode.RAGGED_VERIFY in geometry.modes:
        tensors.append(BufferSpec("q_indptr", Role.QO_INDPTR, (reqs + 1,), "int32", Unit.ROWS, "max_reqs + 1"))
    if Form.ENGINE_SLOTS in geometry.forms:
        tensors.append(BufferSpec("slots", Role.SLOT_MAPPING, (rows,), "int64", Unit.TOKENS, "max_rows_any"))
    width = 0 if isinstance(geometry, StateGeometry) else geometry.attention.chosen_width
    if width:
        lists, formula = (rows, width), "max_rows_any × chosen_width"
        tensors.append(BufferSpec("chosen_slots", Role.CHOSEN_SLOTS, lists, "int32", Unit.SLOTS, formula))
        tensors.append(BufferSpec("chosen_counts", Role.CHOSEN_COUNTS, (rows,), "int32", Unit.ROWS, "max_rows_any"))
    if state or isinstance(geometry, StateGeometry):
        tensors.append(BufferSpec("parents", Role.TAIL_PARENTS, (depth,), "int32", Unit.ROWS, depth_formula))
        tensors.append(BufferSpec("state_slots", Role.STATE_SLOTS, (reqs,), "int32", Unit.SLOTS, "max_reqs"))
    return tensors
