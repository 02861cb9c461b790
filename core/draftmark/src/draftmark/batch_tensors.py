"""The core's static batch tensors: one list that `BatchBuffers` allocates and `draftmark size` prints. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .buffers import Unit
from .geometry import DTYPE_BYTES, Geometry


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
    return [
        BatchTensor("prefix_lens", "lengths", (reqs,), "int32", Unit.TOKENS, "max_reqs"),
        BatchTensor("page_table", "page_table", table, "int32", Unit.PAGES, "max_reqs × max_pages_per_req"),
        BatchTensor("positions", "positions", (rows,), "int64", Unit.TOKENS, "max_rows_any"),
        BatchTensor("mask", "tail_mask", (rows, words), "int32", Unit.WORDS, "max_rows_any × mask_words"),
        BatchTensor("depth", "tail_depth", (reqs * geometry.max_tail,), "int32", Unit.TOKENS, "max_reqs · max_tail"),
    ]
