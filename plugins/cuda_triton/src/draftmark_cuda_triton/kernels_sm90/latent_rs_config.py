"""Compile-time constants of the latent kernel with q in registers, and the values derived from them."""

from __future__ import annotations

from dataclasses import dataclass

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .latent_config import LatentConstants


@dataclass(frozen=True, kw_only=True)
class LatentRsConstants(LatentConstants):
    """Holds the compile-time constants of `latent_rs.attend_latent_rs`.

    Attributes:
        REST_STAGES: pipeline stages of the rest of key tiles; STAGES are those of the value part. A rest is free as
            soon as its scores are complete, so it needs fewer stages.
        RAW_CHUNKS: chunks of each half of e4m3 tiles in flight, before the value warp groups upcast them into the
            stages; 0 if the rows have q's dtype.
        SCALED: bit 0 if keys have a scale, bit 1 if values have one.
    """

    REST_STAGES: int
    RAW_CHUNKS: int
    SCALED: int


@gluon.constexpr_function
def make_latent_rs_constants(**values):
    """Create `LatentRsConstants` inside a kernel."""
    return LatentRsConstants(**values)


@gluon.constexpr_function
def waits_for_scores(CFG):
    """Return True if values of a key tile are multiplied after the scores of the next tile, during its softmax.

    With three stages this is faster, because no other products then run during the scores. Next to e4m3 rows, a value
    warp group upcasts a later key tile during the softmax.
    """
    return CFG.RAW_CHUNKS == 0


@gluon.constexpr_function
def weights_in_registers(CFG):
    """Return True if the value warp groups take p to registers, so that its message is released before the products.

    With 256 value columns in a half, the accumulators leave no registers for p.
    """
    return CFG.VALUE_DIM <= 256


@gluon.constexpr_function
def query_layout(CFG):
    """Return the register layout of rows of q, the first operand of the scores."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CFG.BLOCK_N, 16]), 2)


@gluon.constexpr_function
def query_pieces(CFG, half):
    """Return the pieces of a half of the value part of q: first column, number of columns, True if in registers.

    The softmax warp group has registers for 432 columns. The others of 512 value columns stay in shared memory, like
    the rest.
    """
    if CFG.VALUE_DIM == 512 and half == 1:
        return [(0, 64, True), (64, 64, True), (128, 32, True), (160, 16, True), (176, 16, False), (192, 64, False)]
    width = min(64, CFG.VALUE_DIM // 2)
    return [(column, width, True) for column in range(0, CFG.VALUE_DIM // 2, width)]


@gluon.constexpr_function
def rest_in_registers(CFG):
    """Return True if the rest of q stays in registers: next to wide key tiles, which leave no shared memory for it."""
    return CFG.BLOCK_N > 64


@gluon.constexpr_function
def piece_column(CFG, half, i):
    """Return the first column of a piece of q (`query_pieces`)."""
    return query_pieces(CFG, half)[i][0]


@gluon.constexpr_function
def piece_width(CFG, half, i):
    """Return the columns of a piece of q (`query_pieces`)."""
    return query_pieces(CFG, half)[i][1]


@gluon.constexpr_function
def in_registers(CFG, half, i):
    """Return True if a piece of q stays in registers (`query_pieces`)."""
    return query_pieces(CFG, half)[i][2]


@gluon.constexpr_function
def num_pieces(CFG, half):
    """Return the number of pieces of a half of the value part of q (`query_pieces`)."""
    return len(query_pieces(CFG, half))


@gluon.constexpr_function
def full_barriers(CFG, half):
    """Return the index of the first full barrier of a half; half 2 is the rest."""
    return half * CFG.STAGES


@gluon.constexpr_function
def empty_barriers(CFG, half):
    """Return the index of the first empty barrier of a half; half 2 is the rest."""
    return 2 * CFG.STAGES + CFG.REST_STAGES + half * CFG.STAGES


@gluon.constexpr_function
def message_barriers(CFG):
    """Return the index of the full barrier of messages; the empty barrier and that of scores are next."""
    return 4 * CFG.STAGES + 2 * CFG.REST_STAGES


@gluon.constexpr_function
def query_barriers(CFG):
    """Return the index of the first barrier of stages for rows of q next to e4m3 rows; there are three."""
    return message_barriers(CFG) + 3


@gluon.constexpr_function
def raw_full_barriers(CFG):
    """Return the index of the full barrier of the first e4m3 chunk; those of the rest follow both halves."""
    return query_barriers(CFG) + 3


@gluon.constexpr_function
def raw_empty_barriers(CFG):
    """Return the index of the empty barrier of the first e4m3 chunk; those of the rest follow both halves."""
    return raw_full_barriers(CFG) + 2 * CFG.RAW_CHUNKS + 2


@gluon.constexpr_function
def barrier_arrivals(CFG):
    """Return the arrivals that complete each barrier.

    TMA, or one thread that has upcast a part, completes a full barrier, the threads of one warp group an empty barrier
    of the pipeline and one of `query_barriers`. One softmax thread completes the full barrier of messages, and the
    threads of both value warp groups the empty barrier. TMA completes the full barriers of e4m3 chunks, and one thread
    their empty barriers.
    """
    stages, raw = 2 * CFG.STAGES + CFG.REST_STAGES, 2 * (2 * CFG.RAW_CHUNKS + 2)
    e4m3 = [128] * 3 + [1] * raw if CFG.RAW_CHUNKS else []
    return [1] * stages + [128] * stages + [1, 256, 128] + e4m3
