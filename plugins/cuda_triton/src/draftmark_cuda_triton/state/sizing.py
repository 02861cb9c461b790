"""Buffers and block sizes of layers with recurrent state. No torch; the buffers also accept symbolic sizes."""

from __future__ import annotations

from typing import NamedTuple

from draftmark import BufferSpec, Gate, Mode, Recurrence, StateGeometry, StateShape, ceil_div, minimum

from ..heuristics.common import next_power_of_two
from ..heuristics.sm90 import SM90
from ..switches import uses_generic_kernels
from .extend_sizing import extend_buffers

KEYS, UPDATES, DECAYS, CHANNELS = "keys", "updates", "decays", "channels"
TOTALS, MATRICES = "totals", "matrices"
"""Buffer names: records of a verify's rows, and scratch memory of the layer that runs now."""
LINE_BYTES = 128
"""Bytes of one state row that adjacent threads load together: a cache line."""
WARP_BYTES = 16
"""Bytes that one thread loads at once."""
ROWS_PER_BLOCK = 16
"""Rows that the verify kernel computes together."""


class StateBlocks(NamedTuple):
    """Tile of the state that one program of `recur_rows` or `commit` holds: ``[chunks, block_v, chunk]``.

    Key element i is element ``i % chunk`` of chunk ``i // chunk``. So eight threads load one cache line of a state row,
    and a sum over keys needs three shuffles.

    Attributes:
        block_v: value elements.
        chunk, chunks: key elements of a cache line, and cache lines of a state row.
        num_warps: warps of a program.
        max_registers: registers of a thread; more programs of fewer registers keep more loads in flight.
        sm90: commits run `kernels_sm90.state_commit`, with tiles of `sm90_commit_block_v`.
    """

    block_v: int
    chunk: int
    chunks: int
    num_warps: int
    max_registers: int
    sm90: bool


def state_blocks(geometry: StateGeometry) -> StateBlocks:
    """Return the tile of the kernels that read and write a state row by row."""
    s = geometry.state
    keys = next_power_of_two(s.key_dim)
    chunk = min(keys, LINE_BYTES // (2 if s.state_dtype != "float32" else 4))
    block_v = min(32, next_power_of_two(s.value_dim), max(1, 8192 // keys))
    # More threads than keys: Triton then loads a row's keys in the layout of the tile.
    num_warps = max(1, min(8, block_v * keys // 512))
    return StateBlocks(block_v, chunk, keys // chunk, num_warps, 48, serves_sm90(geometry))


class VerifyBlocks(NamedTuple):
    """Tile of the state that one program of `recur_verify` holds: ``[block_v, block_k]``.

    Attributes:
        block_v, block_k: value elements, and key elements rounded up to a power of two.
        num_warps: warps of a program.
        max_registers: registers of a thread; more programs of fewer registers keep more loads in flight.
        sm90: the kernel is `kernels_sm90.state_verify`; a warp has 16 value elements.
    """

    block_v: int
    block_k: int
    num_warps: int
    max_registers: int
    sm90: bool


def verify_blocks(geometry: StateGeometry) -> VerifyBlocks:
    """Return the tile of the verify kernel; its matrix products need 16 value and key elements or more."""
    s, nodes = geometry.state, geometry.draft.num_draft_tokens
    block_k = max(16, next_power_of_two(s.key_dim))
    block_v = min(64, max(16, next_power_of_two(s.value_dim)), max(16, 8192 // block_k))
    if serves_sm90(geometry) and s.dtype == "bfloat16":
        # Without a delta rule a program needs fewer registers, and five of them fit on an SM.
        few = s.recurrence is Recurrence.DECAY and s.gate is not Gate.KEY and nodes <= ROWS_PER_BLOCK
        return VerifyBlocks(block_v, block_k, block_v // 16, 96 if few else 128, True)
    return VerifyBlocks(block_v, block_k, max(1, min(4, block_v * block_k // 1024)), 168, False)


def serves_sm90(geometry: StateGeometry) -> bool:
    """Check whether the kernels of `kernels_sm90` serve a layer: tiles without padding, and 16 bytes a copy."""
    s, device = geometry.state, geometry.device
    if device.kind != "cuda" or device.arch != SM90 or uses_generic_kernels():
        return False
    whole = s.key_dim == next_power_of_two(s.key_dim) and s.value_dim == next_power_of_two(s.value_dim)
    return whole and s.key_dim >= 32 and s.value_dim >= 16


def state_parts(shape: StateShape) -> int:
    """Return the bfloat16 numbers into which the verify kernel splits a state element; 0 if rows are not bfloat16."""
    if shape.dtype != "bfloat16":
        return 0
    return 1 if shape.state_dtype == "bfloat16" else 3


def state_buffers(geometry: StateGeometry) -> list[BufferSpec]:
    """Return the records of a verify's rows in every layer, and the scratch memory of one layer.

    A record has the key, the update u and the decay of a row, and its channels. u has 32 bits with a delta rule, where
    it is computed; otherwise it is v.
    """
    s, lead = geometry.state, _rows(geometry)
    specs: list[BufferSpec] = []

    def record(name: str, shape: tuple[int, ...], dtype: str) -> None:
        formula = "num_layers × max_reqs × D × elements of a row"
        specs.append(BufferSpec(name, shape, dtype, formula))

    if s.recurrence is not Recurrence.NONE:
        record(KEYS, (*lead, s.num_key_heads, s.key_dim), s.dtype)
        dtype = "float32" if s.recurrence is Recurrence.DELTA else s.dtype
        record(UPDATES, (*lead, s.num_heads, s.value_dim), dtype)
        per_key = (s.key_dim,) if s.gate is Gate.KEY else ()
        rows = (geometry.num_layers,) if s.gate is Gate.CONSTANT else lead
        record(DECAYS, (*rows, s.num_heads, *per_key), "float32")
        totals = (*lead[1:], s.num_heads, *per_key)
        formula = "max_reqs × D × elements of a row's decays"
        specs.append(BufferSpec(TOTALS, totals, "float32", formula))
        blocks, width = ceil_div(lead[2], ROWS_PER_BLOCK), minimum(lead[2], ROWS_PER_BLOCK)
        matrices = (geometry.max_reqs, s.num_heads, blocks * (blocks + 1) // 2, 2, width, width)
        formula = "max_reqs × heads × pairs of row blocks × 2 matrices"
        specs.append(BufferSpec(MATRICES, matrices, "float32", formula))
    record(CHANNELS, (*lead, s.conv_channels), s.conv_dtype)
    return specs + (extend_buffers(geometry) if Mode.EXTEND in geometry.modes else [])


def _rows(geometry: StateGeometry) -> tuple[int, int, int]:
    """Return the layers, requests and rows that a verify records; without a verify no rows."""
    verifies = {Mode.VERIFY, Mode.RAGGED_VERIFY}.intersection(geometry.modes)
    return geometry.num_layers, geometry.max_reqs, geometry.draft.num_draft_tokens if verifies else 0
