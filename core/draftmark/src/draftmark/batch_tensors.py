"""The core's static batch tensors: one list that `BatchBuffers` allocates and `draftmark size` prints. No torch."""

from __future__ import annotations

from .buffers import BufferSpec, Role, Unit
from .geometry import Geometry


def batch_tensors(geometry: Geometry) -> list[BufferSpec]:
    """Every static tensor of a `ForwardBatch`, as large as the largest batch, in the order of its fields."""
    reqs, rows, words = geometry.max_reqs, geometry.max_rows_any, geometry.mask_words
    table, slots = (reqs, geometry.max_pages_per_req), (reqs * geometry.max_tail,)
    return [
        BufferSpec("prefix_lens", Role.KV_LENS, (reqs,), "int32", Unit.TOKENS, "max_reqs"),
        BufferSpec("page_table", Role.PAGE_TABLE, table, "int32", Unit.PAGES, "max_reqs × max_pages_per_req"),
        BufferSpec("positions", Role.POSITIONS, (rows,), "int64", Unit.TOKENS, "max_rows_any"),
        BufferSpec("mask", Role.TAIL_MASK, (rows, words), "int32", Unit.WORDS, "max_rows_any × mask_words"),
        BufferSpec("depth", Role.TAIL_DEPTH, slots, "int32", Unit.TOKENS, "max_reqs · max_tail"),
    ]
