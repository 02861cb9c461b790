"""Buffers and block sizes of the recurrence of a prompt (EXTEND). No torch; the buffers accept symbolic sizes."""

from __future__ import annotations

from typing import NamedTuple

from draftmark import BufferSpec, Gate, Mode, Recurrence, Role, StateGeometry, StateShape, Unit

from ..heuristics.common import next_power_of_two

CHUNK = 64
"""Rows of a prompt that the kernels compute together; `kernels.extend_chunks.CHUNK`."""
MAX_KEY_DIM = 256
"""Largest key_dim for which a tile of the state fits the registers of a program."""
GATES, SOLVED, SCORES = "chunk_gates", "chunk_solved", "chunk_scores"
KEYS_IN, KEYS_OUT, QUERIES = "chunk_keys_in", "chunk_keys_out", "chunk_queries"
"""Buffers that `kernels.extend_prepare` writes; the last three serve a decay per key element."""


class ExtendBlocks(NamedTuple):
    """Tile of the state that a program of `kernels.extend` holds, and how it runs.

    Attributes:
        block_k, block_v: key and value elements, padded to powers of two.
        num_warps, stages: warps of a program, and chunks that are in flight.
        prepare_warps: warps of a program of `kernels.extend_prepare`.
        precision: Triton's precision of products of float32 operands. Three tf32 products are as precise as float32.
    """

    block_k: int
    block_v: int
    num_warps: int
    stages: int
    prepare_warps: int
    precision: str


def runs_in_chunks(shape: StateShape) -> bool:
    """Check whether EXTEND runs in chunks; otherwise it runs row by row."""
    return not (shape.recurrence is Recurrence.DECAY and shape.gate is Gate.KEY) and shape.key_dim <= MAX_KEY_DIM


def extend_blocks(shape: StateShape) -> ExtendBlocks:
    """Return the block sizes of a layer's EXTEND kernels."""
    wide, by_key = shape.dtype == "float32", shape.gate is Gate.KEY
    block_v = max(16, min(64, next_power_of_two(shape.value_dim)))
    block_k = max(16, next_power_of_two(shape.key_dim))
    stages = 1 if wide else 3 if block_k <= 128 and not by_key else 2
    return ExtendBlocks(block_k, block_v, 4, stages, 8 if by_key else 4, "tf32x3" if wide else "tf32")


def extend_buffers(geometry: StateGeometry) -> list[BufferSpec]:
    """Return the scratch memory of one layer's chunks; a state that only decays needs none."""
    s = geometry.state
    if s.recurrence is not Recurrence.DELTA or not runs_in_chunks(s):
        return []
    block_k, by_key = extend_blocks(s).block_k, s.gate is Gate.KEY
    lead = (geometry.max_rows(Mode.EXTEND) // CHUNK + geometry.max_reqs, s.num_heads)
    formula = f"(max_extend_tokens / {CHUNK} + max_reqs) × num_heads × elements of a chunk"

    def buffer(name: str, shape: tuple[int, ...], dtype: str) -> BufferSpec:
        return BufferSpec(name, Role.WORKSPACE, (*lead, *shape), dtype, Unit.ELEMENTS, formula)

    specs = [buffer(GATES, (block_k if by_key else CHUNK,), "float32")]
    specs += [buffer(name, (CHUNK, CHUNK), s.dtype) for name in (SOLVED, SCORES)]
    keyed = (KEYS_IN, KEYS_OUT, QUERIES) if by_key else ()
    return specs + [buffer(name, (CHUNK, block_k), s.dtype) for name in keyed]
