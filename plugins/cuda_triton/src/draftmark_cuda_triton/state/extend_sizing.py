"""Buffers and block sizes of the recurrence of a prompt (EXTEND). No torch; the buffers accept symbolic sizes."""

from __future__ import annotations

from typing import NamedTuple

from draftmark import DTYPE_BYTES, BufferSpec, Gate, Mode, Recurrence, StateGeometry, StateShape

from ..heuristics.common import next_power_of_two

CHUNK = 64
"""Rows of a prompt that the kernels compute together; `kernels.state_extend_chunks.CHUNK`."""
MIN_BLOCK, MAX_BLOCK_V, MAX_STAGES, MAX_WIDE_BLOCK_K = 16, 64, 3, 128
"""Smallest block of a matrix product; value elements of a program, the rows of a wgmma; chunks in flight; key elements
of a program with float32 operands."""
SHARED_MEMORY = {80: 163 << 10, 87: 163 << 10, 90: 227 << 10, 100: 227 << 10, 103: 227 << 10}
MIN_SHARED_MEMORY = 99 << 10
"""Bytes of shared memory of a block, by compute capability times ten, and of every other GPU from sm_80 on (CUDA C++
Programming Guide, technical specifications)."""
SCRATCH_BYTES = 8 << 10
"""Bytes of a program's shared memory next to its tiles: gates, and layout conversions of the outputs."""
GATES, SOLVED, SCORES = "chunk_gates", "chunk_solved", "chunk_scores"
KEYS_IN, KEYS_OUT, QUERIES = "chunk_keys_in", "chunk_keys_out", "chunk_queries"
SCRATCH = (GATES, SOLVED, SCORES, KEYS_IN, KEYS_OUT, QUERIES)
"""Buffers that `kernels.state_extend_prepare` writes; the last three serve a decay per key element."""


class ExtendBlocks(NamedTuple):
    """Tile of the state that a program of `kernels.state_extend` holds, and how it runs.

    Attributes:
        block_k, block_v: key and value elements, padded to powers of two.
        num_warps, stages: warps of a program, and chunks that are in flight.
        prepare_warps: warps of a program of `kernels.state_extend_prepare`.
        precision: Triton's precision of products of float32 operands. Three tf32 products are as precise as float32.
    """

    block_k: int
    block_v: int
    num_warps: int
    stages: int
    prepare_warps: int
    precision: str


def runs_in_chunks(geometry: StateGeometry) -> bool:
    """Check whether EXTEND runs in chunks; otherwise it runs row by row.

    Chunks round their operands to the rows' dtype, so rows of 16 bits need `StateShape.round_prompts`.

    A decay per key element without a delta rule (Mamba1) has one value element a head, so products do not pay. Chunks
    also need shared memory for one stage, and registers: float32 operands of more than MAX_WIDE_BLOCK_K key elements
    would spill by thousands.
    """
    s = geometry.state
    by_key = s.recurrence is Recurrence.DECAY and s.gate is Gate.KEY
    if by_key or not (s.dtype == "float32" or s.round_prompts):
        return False
    spills = s.dtype == "float32" and _block_k(s) > MAX_WIDE_BLOCK_K
    return not spills and _stage_bytes(s) <= _shared_memory(geometry)


def extend_blocks(geometry: StateGeometry) -> ExtendBlocks:
    """Return the block sizes of a layer's EXTEND kernels."""
    s = geometry.state
    wide, by_key = s.dtype == "float32", s.gate is Gate.KEY
    stages = 1 if wide else max(1, min(MAX_STAGES, _shared_memory(geometry) // _stage_bytes(s)))
    return ExtendBlocks(_block_k(s), _block_v(s), 4, stages, 8 if by_key else 4, "tf32x3" if wide else "tf32")


def _block_k(shape: StateShape) -> int:
    return max(MIN_BLOCK, next_power_of_two(shape.key_dim))


def _block_v(shape: StateShape) -> int:
    return max(MIN_BLOCK, min(MAX_BLOCK_V, next_power_of_two(shape.value_dim)))


def _stage_bytes(shape: StateShape) -> int:
    """Return the bytes of one chunk's tiles in shared memory: keys, queries, values and two matrices."""
    tiles = 3 if shape.gate is Gate.KEY else 2
    return CHUNK * (tiles * _block_k(shape) + _block_v(shape) + 2 * CHUNK) * DTYPE_BYTES[shape.dtype]


def _shared_memory(geometry: StateGeometry) -> int:
    """Return the bytes of shared memory that the tiles of a program may fill."""
    arch = geometry.device.arch
    most = SHARED_MEMORY.get(arch, MIN_SHARED_MEMORY) if geometry.device.kind == "cuda" else SHARED_MEMORY[90]
    return most - SCRATCH_BYTES


def extend_buffers(geometry: StateGeometry) -> list[BufferSpec]:
    """Return the scratch memory of one layer's chunks; a state that only decays needs none."""
    s = geometry.state
    if s.recurrence is not Recurrence.DELTA or not runs_in_chunks(geometry):
        return []
    block_k, by_key = _block_k(s), s.gate is Gate.KEY
    lead = (geometry.max_rows(Mode.EXTEND) // CHUNK + geometry.max_reqs, s.num_heads)
    formula = f"(max_extend_tokens / {CHUNK} + max_reqs) × num_heads × elements of a chunk"

    def buffer(name: str, shape: tuple[int, ...], dtype: str) -> BufferSpec:
        return BufferSpec(name, (*lead, *shape), dtype, formula)

    specs = [buffer(GATES, (block_k if by_key else CHUNK,), "float32")]
    specs += [buffer(name, (CHUNK, CHUNK), s.dtype) for name in (SOLVED, SCORES)]
    keyed = (KEYS_IN, KEYS_OUT, QUERIES) if by_key else ()
    return specs + [buffer(name, (CHUNK, block_k), s.dtype) for name in keyed]
