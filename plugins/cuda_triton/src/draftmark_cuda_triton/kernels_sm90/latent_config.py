"""Compile-time constants of the latent kernel, and the partitions of its CTA."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

UNSPECIALIZED = [
    "q_len", "tail_len", "num_reqs", "num_rows", "group", "mask_words", "window_left", "stride_q_row", "stride_q_head",
    "stride_out_row", "stride_out_head", "stride_table", "num_pages",
]  # fmt: skip
"""Integer arguments of both latent kernels. No kernel is specialized for their values."""
UNALIGNED = ["sinks", "lse", "work", "prefix_lens", "q_indptr", "page_table", "tail_mask", "tail_depth"]
"""Pointers of both latent kernels. No kernel is specialized for their alignment."""


@dataclass(frozen=True)
class LatentConstants:
    """Holds the compile-time constants of `latent.attend_latent`; the fields of `config.KernelConstants` mean the same.

    Attributes:
        VALUE_DIM, REST_DIM: elements of a row that are its value, and elements after it; REST_DIM can be 0.
    """

    PAGE_SIZE: int
    BLOCK_N: int
    BOX_KEYS: int
    VALUE_DIM: int
    REST_DIM: int
    STAGES: int
    TAIL_KIND: int
    WINDOW: bool
    CAP: bool
    SINKS: bool
    WITH_LSE: bool
    OVERHEAD_TILES: int
    STRIDE_ALIGN: int
    BLOCK_M: int = 64
    ROUNDS: bool = False


@gluon.constexpr_function
def make_latent_constants(**values):
    """Create `LatentConstants` inside a kernel."""
    return LatentConstants(**values)


@gluon.constexpr_function
def half_width(CFG):
    """Return the value columns of one value warp group."""
    return CFG.VALUE_DIM // 2


@gluon.constexpr_function
def num_chunks(CFG):
    """Return the number of chunks of a half.

    A CTA of 16 warps is compiled for 128 registers a thread, although `setmaxnreg` gives a value warp group more. So no
    instruction can have 128 registers of accumulators, and a product has at most 128 columns.
    """
    return max(1, CFG.VALUE_DIM // 256)


@gluon.constexpr_function
def chunk_width(CFG):
    """Return the value columns of a chunk."""
    return CFG.VALUE_DIM // 2 // num_chunks(CFG)


@gluon.constexpr_function
def chunk_layout(CFG):
    """Return the register layout of the accumulator of a chunk, ``[64, chunk_width]``."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, chunk_width(CFG), 16])


@gluon.constexpr_function
def part_bytes(CFG, rest):
    """Return the bytes of a tile's rest, or of one half of its values, in 16-bit elements."""
    return CFG.BLOCK_N * (CFG.REST_DIM if rest else CFG.VALUE_DIM // 2) * 2


@gluon.constexpr_function
def query_bytes(CFG, rest):
    """Return the bytes of the rest of 64 rows of q, or of one half of their value part."""
    return part_bytes(CFG, rest) // CFG.BLOCK_N * CFG.BLOCK_M
