"""The core's static batch tensors: one list that `BatchBuffers` allocates and `draftmark size` prints. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .buffers import Unit
from .geometry import DTYPE_BYTES, Form, Geometry, Mode, maximum


@dataclass(frozen=True)
class BatchTensor:
    """One tensor of the batch, as large as the largest batch; fields as in `BufferSpec`."""

    name: str
    role: str
    shape: tuple[int, ...]
    dtype: str
    unit: Unit
    formula: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def batch_tensors(geometry: Geometry) -> list[BatchTensor]:
    """Every static tensor of a `ForwardBatch`, in the order of its fields."""
    reqs, rows, words = geometry.max_reqs, geometry.max_rows_any, geometry.mask_words
    table = (reqs, geometry.max_pages_per_req)
    depth, depth_formula = reqs * geometry.max_tail, "max_reqs · max_tail"
    if Mode.RAGGED_VERIFY in geometry.modes:  # there by row, and a budget may pass what max_reqs requests fill
        depth, depth_formula = maximum(depth, rows), "max(max_reqs · max_tail, max_rows_any)"
    tensors = [
        BatchTensor("prefix_lens", "lengths", (reqs,), "int32", Unit.TOKENS, "max_reqs"),
        BatchTensor("page_table", "page_table", table, "int32", Unit.PAGES, "max_reqs × max_pages_per_req"),
        BatchTensor("positions", "positions", (rows,), "int64", Unit.TOKENS, "max_rows_any"),
        BatchTensor("mask", "tail_mask", (rows, words), "int32", Unit.WORDS, "max_rows_any × mask_words"),
        BatchTensor("depth", "tail_depth", (depth,), "int32", Unit.TOKENS, depth_formula),
    ]
    if Mode.RAGGED_VERIFY in geometry.modes:
        tensors.append(BatchTensor("q_indptr", "qo_indptr", (reqs + 1,), "int32", Unit.ROWS, "max_reqs + 1"))
    if Form.ENGINE_SLOTS in geometry.forms:
        tensors.append(BatchTensor("slots", "slot_mapping", (rows,), "int64", Unit.TOKENS, "max_rows_any"))
    return tensors
