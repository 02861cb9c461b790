"""Decodes tail masks: from the batch's mask words, from a re-encoded buffer, or as causal if there are no words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..layouts import Level, MetadataSpec
from .history import Request
from .problem import DecodeProblem

if TYPE_CHECKING:
    from draftmark.batch import ForwardBatch

    from .truth import Row

WIDTH = {"int32": 32, "int16": 16, "uint16": 16, "int8": 8, "uint8": 8, "bool": 1}
"""Number of bits that one word of a mask holds, by dtype."""


def read_bits(
    level: Level, arena: Mapping[str, Any], batch: ForwardBatch, requests: list[Request], spec: MetadataSpec
) -> dict[Row, set[int]]:
    """Return the tail slots (new tokens of its request) that each row sees.

    A backend that re-encodes the mask names a ``tail_mask`` buffer. With ``mask_indptr``, the bits of a request start
    at the word that it gives, T bits per row, row by row. Otherwise row r starts ``mask_stride`` words after row r - 1.
    ``qo_indptr``, if named, then counts the rows. A request with more rows there than queries has dummy rows at its
    start or its end (``dummy_rows``).

    When the batch is causal and the buffer still contains poison, the backend did not write the buffer. Its kernel then
    does not read it, and the rows are causal.
    """
    tree = getattr(batch.tail, "mask", None)
    name = level.buffers.get("tail_mask")
    if name is None:
        return _causal(requests) if tree is None else _strided(tree.flatten().tolist(), tree.shape[1], 32, requests)
    words = arena[name].flatten().tolist()
    width = WIDTH[spec.mask_dtype]
    if tree is None and _untouched(words, width):
        return _causal(requests)
    if "mask_indptr" in level.buffers:
        return _packed(words, arena[level.buffers["mask_indptr"]].flatten().tolist(), width, requests)
    starts = None
    if "qo_indptr" in level.buffers:
        indptr = arena[level.buffers["qo_indptr"]].flatten()[: len(requests) + 1].tolist()
        ends_with_own = spec.dummy_rows == "first"
        starts = [indptr[n + 1] - one.rows if ends_with_own else indptr[n] for n, one in enumerate(requests)]
    return _strided(words, int(spec.mask_stride), width, requests, starts)


def _causal(requests: list[Request]) -> dict[Row, set[int]]:
    return {(n, row): set(range(one.own_slot(row) + 1)) for n, one in enumerate(requests) for row in range(one.rows)}


def _untouched(words: list[int], width: int) -> bool:
    poison = {-1, 2**width - 1, True} if width > 1 else {True}
    return bool(words) and words[0] in poison


def _strided(
    words: list[int], stride: int, width: int, requests: list[Request], starts: list[int] | None = None
) -> dict[Row, set[int]]:
    found: dict[Row, set[int]] = {}
    at = 0
    for n, one in enumerate(requests):
        first = at if starts is None else starts[n]
        for row in range(one.rows):
            line = words[(first + row) * stride : (first + row + 1) * stride]
            seen = {bit for bit in range(stride * width) if line[bit // width] >> (bit % width) & 1}
            beyond = sorted(bit for bit in seen if bit >= one.tail)
            if beyond and one.live:
                raise DecodeProblem(
                    f"mask row {row} of request {n} has bits at and above its tail of {one.tail}", beyond, "zeros"
                )
            found[n, row] = seen
        at += one.rows
    return found


def _packed(words: list[int], indptr: list[int], width: int, requests: list[Request]) -> dict[Row, set[int]]:
    found: dict[Row, set[int]] = {}
    for n, one in enumerate(requests):
        for row in range(one.rows):
            bits = [indptr[n] * width + row * one.tail + slot for slot in range(one.tail)]
            if bits and bits[-1] // width >= len(words):
                raise DecodeProblem(f"the mask of request {n} ends past its buffer", bits[-1] // width + 1, len(words))
            found[n, row] = {slot for slot, bit in enumerate(bits) if words[bit // width] >> (bit % width) & 1}
    return found
