"""Specifications of the core's static batch tensors, for `BatchBuffers` and `draftmark size`. Does not import torch."""

from __future__ import annotations

from .buffers import BufferSpec
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
        BufferSpec("prefix_lens", (reqs,), "int32", "max_reqs"),
        BufferSpec("page_table", table, "int32", "max_reqs × max_pages_per_req"),
        BufferSpec("positions", (rows,), "int64", "max_rows_any"),
        BufferSpec("mask", (rows, words), "int32", "max_rows_any × mask_words"),
        BufferSpec("depth", (depth,), "int32", depth_formula),
    ]
    if Mode.RAGGED_VERIFY in geometry.modes:
        tensors.append(BufferSpec("q_indptr", (reqs + 1,), "int32", "max_reqs + 1"))
    if Form.ENGINE_SLOTS in geometry.forms:
        tensors.append(BufferSpec("slots", (rows,), "int64", "max_rows_any"))
    width = 0 if isinstance(geometry, StateGeometry) else geometry.attention.chosen_width
    if width:
        lists, formula = (rows, width), "max_rows_any × chosen_width"
        tensors.append(BufferSpec("chosen_slots", lists, "int32", formula))
        tensors.append(BufferSpec("chosen_counts", (rows,), "int32", "max_rows_any"))
    if state or isinstance(geometry, StateGeometry):
        tensors.append(BufferSpec("parents", (depth,), "int32", depth_formula))
        tensors.append(BufferSpec("state_slots", (reqs,), "int32", "max_reqs"))
    return tensors
