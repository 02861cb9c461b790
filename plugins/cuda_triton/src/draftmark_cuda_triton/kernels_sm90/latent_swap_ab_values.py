"""Value warp groups of `latent_swap_ab`: each accumulates Vᵀ · Pᵀ for a part of the value columns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .latent_swap_ab_config import BUFFERS, STEP, operand_layout, part_cells, swapped_layout
from .latent_swap_ab_memory import (
    empty_barrier,
    full_barrier,
    message_empty,
    message_full,
    message_phase,
    scores_done,
    tile_of,
    word_of,
)
from .mma_fp8_swap_ab import upcast_v
from .pipeline import advance


@gluon.jit
def receive_count(memory, message, CFG: gl.constexpr):
    """Return the number of key tiles of the next request (`SwapAbMemory.words`)."""
    mbarrier.wait(message_full(memory, message, CFG), message_phase(message))
    count = word_of(memory, message)
    async_copy.mbarrier_arrive(message_empty(memory, message, CFG), increment_count=False)
    return count


@gluon.jit
def load_cells(tile, step: gl.constexpr, CFG: gl.constexpr):
    """Return 64 cells of STEP keys of a part of a key tile as Vᵀ."""
    CHUNKS: gl.constexpr = part_cells(CFG) // 64
    cells = tile.slice(STEP * (step // CHUNKS), STEP, dim=0).slice(64 * (step % CHUNKS), 64, dim=1)
    return cells.permute((1, 0)).load(operand_layout(CFG))


@gluon.jit
def multiply_cells(even, odd, p, acc, i: gl.constexpr):
    """Issue the products of 64 cells, added to the accumulators i and i + 1."""
    first = warpgroup_mma(even, p, acc[i], is_async=True)
    second = warpgroup_mma(odd, p, acc[i + 1], is_async=True)
    return acc[:i] + (first, second) + acc[i + 2 :]  # noqa: RUF005


@gluon.jit
def multiply_values(acc, memory, tile, message, CFG: gl.constexpr):
    """Return the accumulators plus the product of a part of a key tile with p of a message.

    Cells are loaded and converted while the two products before are in progress. A wait names the operands of the
    completed products, because the compiler would otherwise wait before it converts the next ones.
    """
    weights = memory.weights.index(message % BUFFERS)
    CHUNKS: gl.constexpr = part_cells(CFG) // 64
    STEPS: gl.constexpr = CFG.BLOCK_N // STEP * CHUNKS
    cells = load_cells(tile, 0, CFG)
    even, odd = upcast_v(cells)
    for step in gl.static_range(STEPS):
        next_even, next_odd = upcast_v(cells)
        if step + 1 < STEPS:
            cells = load_cells(tile, step + 1, CFG)
        p = weights.slice(STEP * (step // CHUNKS), STEP, dim=1).permute((1, 0))
        acc = multiply_cells(next_even, next_odd, p, acc, 2 * (step % CHUNKS))
        if step > 0:
            done = warpgroup_mma_wait(2, deps=acc + (even, odd))  # noqa: RUF005
            acc = done[: 2 * CHUNKS]
        even = next_even
        odd = next_odd
    done = warpgroup_mma_wait(0, deps=acc + (even, odd))  # noqa: RUF005
    return done[: 2 * CHUNKS]


@gluon.jit
def store_part(acc, target, memory, message, column: gl.constexpr, ALIGN: gl.constexpr, CFG: gl.constexpr):
    """Store a part of the output, or of the partial results, times the factors of a message, to its places."""
    for chunk in gl.static_range(part_cells(CFG) // 64):
        store_chunk(acc[2 * chunk], acc[2 * chunk + 1], target, memory, message, column + 128 * chunk, ALIGN)


@gluon.jit
def store_chunk(even, odd, target, memory, message, column: gl.constexpr, ALIGN: gl.constexpr):
    """Store two accumulators as adjacent columns."""
    out = gl.join(even, odd).permute((0, 2, 1)).reshape([2 * even.shape[0], even.shape[1]])
    LAYOUT: gl.constexpr = out.type.layout
    factors = memory.factors.index(message % BUFFERS).load(gl.SliceLayout(0, LAYOUT))
    places = memory.places.index(message % BUFFERS).load(gl.SliceLayout(0, LAYOUT))
    out = (out * factors[None, :]).to(target.dtype.element_ty)
    col = column + gl.arange(0, 2 * even.shape[0], gl.SliceLayout(1, LAYOUT))
    # `gl.multiple_of` has no effect on an argument, and without it a store has one element.
    pointers = target + (places // ALIGN * ALIGN)[None, :] + col[:, None]
    gl.store(pointers, out, mask=(places >= 0)[None, :] & (col >= 0)[:, None])


@gluon.jit
def scale_all(acc, factors):
    """Return accumulators times a factor for each row."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        scaled = scaled + (acc[i] * factors[None, :],)  # type: ignore[assignment]  # noqa: RUF005
    return scaled


@gluon.jit
def run_values(args, PART: gl.constexpr, CFG: gl.constexpr):
    """Accumulate one part of the value columns for every request in this CTA's split, and store it."""
    out, partial_out, memory = args
    column: gl.constexpr = PART * 2 * part_cells(CFG)
    STRIDE_ALIGN: gl.constexpr = CFG.STRIDE_ALIGN
    VALUE_DIM: gl.constexpr = CFG.VALUE_DIM
    stage = gl.program_id(0) * 0
    phase = stage
    message = stage
    number = stage
    count = receive_count(memory, message, CFG)
    message += 1
    while count != 0:
        acc = ()
        for _ in gl.static_range(part_cells(CFG) // 32):
            acc = acc + (gl.full([64, CFG.BLOCK_M], 0.0, gl.float32, swapped_layout(CFG)),)  # type: ignore[assignment]  # noqa: RUF005
        for _ in range(gl.maximum(count, 0 - count)):
            mbarrier.wait(message_full(memory, message, CFG), message_phase(message))
            if word_of(memory, message) != 0:
                factors = memory.factors.index(message % BUFFERS).load(gl.SliceLayout(0, swapped_layout(CFG)))
                acc = scale_all(acc, factors)
            # Values of a key tile are multiplied after the scores of the next tile, during its softmax. Otherwise their
            # products delay the scores, and no products run during the softmax.
            mbarrier.wait(scores_done(memory, number, CFG), message_phase(number))
            number += 1
            mbarrier.wait(full_barrier(memory, PART, stage, CFG), phase)
            acc = multiply_values(acc, memory, tile_of(memory, PART, stage, CFG), message, CFG)
            async_copy.mbarrier_arrive(message_empty(memory, message, CFG), increment_count=False)
            async_copy.mbarrier_arrive(empty_barrier(memory, PART, stage, CFG), increment_count=False)
            message += 1
            stage, phase = advance(stage, phase, CFG.STAGES)
        mbarrier.wait(message_full(memory, message, CFG), message_phase(message))
        if count > 0:
            store_part(acc, out, memory, message, column, STRIDE_ALIGN, CFG)
        else:
            store_part(acc, partial_out, memory, message, column, VALUE_DIM, CFG)
        async_copy.mbarrier_arrive(message_empty(memory, message, CFG), increment_count=False)
        message += 1
        count = receive_count(memory, message, CFG)
        message += 1
