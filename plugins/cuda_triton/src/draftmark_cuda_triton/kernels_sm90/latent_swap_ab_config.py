"""Compile-time constants of the latent kernel for e4m3 rows, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .latent_config import LatentConstants

NUM_PARTS = gl.constexpr(2)
"""Parts of the value columns, each with its own value warp group."""
STEP = gl.constexpr(16)
"""Keys of V that a value warp group converts at once."""
BUFFERS = gl.constexpr(2)
"""Buffers of messages (`latent_swap_ab_memory.SwapAbMemory`)."""


@dataclass(frozen=True, kw_only=True)
class LatentSwapAbConstants(LatentConstants):
    """Holds the compile-time constants of `latent_swap_ab.attend_latent_swap_ab`.

    Attributes:
        SCALED: bit 0 if keys have a scale, bit 1 if values have one.
    """

    SCALED: int


@gluon.constexpr_function
def make_latent_swap_ab_constants(**values):
    """Create `LatentSwapAbConstants` inside a kernel."""
    return LatentSwapAbConstants(**values)


@gluon.constexpr_function
def swapped_layout(CFG):
    """Return the register layout of scores ``[BLOCK_N, BLOCK_M]`` and of accumulators ``[columns, BLOCK_M]``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CFG.BLOCK_M, 16])


@gluon.constexpr_function
def operand_layout(CFG):
    """Return the register layout of K and V, the first operand of the products."""
    return gl.DotOperandLayout(0, swapped_layout(CFG), 2)


@gluon.constexpr_function
def part_cells(CFG):
    """Return the cells of two e4m3 values in a part of a row's value columns."""
    return CFG.VALUE_DIM // 2 // NUM_PARTS.value


@gluon.constexpr_function
def piece_width(CFG):
    """Return the cells of K that the softmax warp group converts at once."""
    return 16 if CFG.REST_DIM == 32 else 32


@gluon.constexpr_function
def tile_bytes(CFG, part):
    """Return the bytes of a part of a key tile; of the last part with the rest."""
    return CFG.BLOCK_N * (2 * part_cells(CFG) + (CFG.REST_DIM if part == NUM_PARTS.value - 1 else 0))


@gluon.constexpr_function
def query_bytes(CFG):
    """Return the bytes of the packed rows of q of a row tile."""
    return CFG.BLOCK_M * (CFG.VALUE_DIM + CFG.REST_DIM) * 2


@gluon.constexpr_function
def barrier_index(CFG, kind):
    """Return the index of the first barrier of a kind: full and empty of parts, messages and q; scores."""
    stages = NUM_PARTS.value * CFG.STAGES
    counts = [stages, stages, BUFFERS.value, BUFFERS.value, 1, 1]
    return sum(counts[:kind])


@gluon.constexpr_function
def barrier_arrivals(CFG):
    """Return the arrivals that complete each barrier.

    TMA completes a full barrier. The threads of the softmax warp group and of one value warp group complete an empty
    barrier. One softmax thread completes the full barrier of messages, and the threads of all value warp groups the
    empty barrier. TMA completes the full barrier of q, and the softmax threads the empty barrier
    and those of scores.
    """
    stages, values = NUM_PARTS.value * CFG.STAGES, 128 * NUM_PARTS.value
    messages = [1] * BUFFERS.value + [values] * BUFFERS.value
    return [1] * stages + [256] * stages + messages + [1, 128] + [128] * BUFFERS.value
