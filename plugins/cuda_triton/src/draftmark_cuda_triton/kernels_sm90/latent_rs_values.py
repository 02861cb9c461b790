"""Value warp groups of `latent_rs`: each accumulates p · value for half of the value columns, and upcasts e4m3 rows."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .gluon_compat import thread_barrier
from .latent_config import chunk_layout, chunk_width, half_width, num_chunks
from .latent_rs_config import waits_for_scores, weights_in_registers
from .latent_rs_memory import (
    advance_both,
    count_of,
    empty_barrier,
    message_empty,
    message_full,
    places_of,
    query_barrier,
    scores_done,
    tile_of,
)
from .latent_rs_upcast import upcast_chunk, upcast_chunks, upcast_first_tiles
from .latent_values import any_moved
from .softmax import rescale_if_moved


@gluon.jit
def store_half(acc, target, places, column: gl.constexpr, ALIGN: gl.constexpr, CFG: gl.constexpr):
    """Store a half of the output, or of the partial results, to rows at offsets `places` of `target`; -1 for none."""
    for chunk in gl.static_range(num_chunks(CFG)):
        col = column + chunk * chunk_width(CFG)
        col += gl.arange(0, chunk_width(CFG), gl.SliceLayout(0, chunk_layout(CFG)))
        # `gl.multiple_of` has no effect on an argument, and without it a store has one element.
        pointers = target + (places // ALIGN * ALIGN)[:, None] + col[None, :]
        mask = (places >= 0)[:, None] & (col >= 0)[None, :]
        gl.store(pointers, acc[chunk].to(target.dtype.element_ty), mask=mask)


@gluon.jit
def issue_values(acc, factors, memory, stage, HALF: gl.constexpr, CFG: gl.constexpr):
    """Issue p · value of a stage, added to the accumulators of a half times each row's factor."""
    weights = memory.weights
    if weights_in_registers(CFG):
        weights = weights.load(gl.DotOperandLayout(0, chunk_layout(CFG), 2))
    moved = any_moved(factors)
    scaled = ()
    for chunk in gl.static_range(num_chunks(CFG)):
        scaled = scaled + (rescale_if_moved(acc[chunk], factors, moved),)  # type: ignore[assignment]  # noqa: RUF005
    # All accumulators are ready before the first product is issued, because the compiler would otherwise wait between
    # the products.
    new_acc = ()
    for chunk in gl.static_range(num_chunks(CFG)):
        product = warpgroup_mma(weights, tile_of(memory, HALF, chunk, stage, CFG), scaled[chunk], is_async=True)
        new_acc = new_acc + (product,)  # type: ignore[assignment]  # noqa: RUF005
    return new_acc


@gluon.jit
def wait_values(acc, PENDING: gl.constexpr):
    """Wait until all but the last PENDING products are complete, and return the accumulators."""
    if len(acc) == 1:  # noqa: SIM108  Gluon has no conditional expression of tuples
        acc = (warpgroup_mma_wait(PENDING, deps=acc),)
    else:
        acc = warpgroup_mma_wait(PENDING, deps=acc)
    return acc


@gluon.jit
def receive_count(memory, message, CFG: gl.constexpr):
    """Return the number of key tiles of the next request (`count_of`)."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(message_full(memory, CFG), message)
    count = gl.max(count_of(memory).load(lanes), 0)
    async_copy.mbarrier_arrive(message_empty(memory, CFG), increment_count=False)
    return count


@gluon.jit
def run_values(args, HALF: gl.constexpr, CFG: gl.constexpr):
    """Accumulate one half of the value columns for every request in this CTA's split, and store it."""
    out, partial_out, memory = args
    rows: gl.constexpr = gl.SliceLayout(1, chunk_layout(CFG))
    column: gl.constexpr = HALF * half_width(CFG)
    STRIDE_ALIGN: gl.constexpr = CFG.STRIDE_ALIGN
    VALUE_DIM: gl.constexpr = CFG.VALUE_DIM
    zero = gl.program_id(0) * 0
    state = (zero, zero, zero, zero)
    number = zero
    message = zero
    gate = zero
    count = receive_count(memory, message, CFG)
    while count != 0:
        message ^= 1
        # The stage before a request's first key tile holds its rows of q.
        state = advance_both(state, CFG)
        stop = number + gl.maximum(count, 0 - count)
        last_before_queries = gl.maximum(stop - CFG.STAGES, number)
        if CFG.RAW_CHUNKS > 0:
            upcast_first_tiles(memory, state, number, stop, HALF, CFG)
        acc = ()
        for _ in gl.static_range(num_chunks(CFG)):
            acc = acc + (gl.full([64, chunk_width(CFG)], 0.0, gl.float32, chunk_layout(CFG)),)  # type: ignore[assignment]  # noqa: RUF005
        for tile in range(number, stop):
            stage, _phase, rest_stage, rest_phase = state
            mbarrier.wait(message_full(memory, CFG), message)
            factors = memory.factors.load(rows)
            if waits_for_scores(CFG):
                mbarrier.wait(scores_done(memory, CFG), gate)
                gate ^= 1
            # The stage is full, because the softmax warp group has read it.
            acc = issue_values(acc, factors, memory, stage, HALF, CFG)
            if weights_in_registers(CFG):
                async_copy.mbarrier_arrive(message_empty(memory, CFG), increment_count=False)
            if CFG.RAW_CHUNKS > 0 and num_chunks(CFG) == 2:
                acc = wait_values(acc, 1)
                if tile + CFG.STAGES < stop:
                    thread_barrier()  # each warp has waited for its own products only
                    upcast_chunk(memory, tile + CFG.STAGES, stage, HALF, 0, CFG)
            acc = wait_values(acc, 0)
            if not weights_in_registers(CFG):
                async_copy.mbarrier_arrive(message_empty(memory, CFG), increment_count=False)
            async_copy.mbarrier_arrive(empty_barrier(memory, HALF, stage, CFG), increment_count=False)
            if CFG.RAW_CHUNKS > 0:
                if tile + CFG.STAGES < stop:
                    thread_barrier()
                    upcast_chunks(
                        memory, tile + CFG.STAGES, stage, rest_stage, rest_phase ^ 1, HALF, num_chunks(CFG) - 1, CFG
                    )
                if tile == last_before_queries:
                    async_copy.mbarrier_arrive(query_barrier(memory, HALF, CFG), increment_count=False)
            message ^= 1
            state = advance_both(state, CFG)
        number = stop
        mbarrier.wait(message_full(memory, CFG), message)
        factors = memory.factors.load(rows)
        places = places_of(memory).load(rows)
        async_copy.mbarrier_arrive(message_empty(memory, CFG), increment_count=False)
        message ^= 1
        result = ()
        for chunk in gl.static_range(num_chunks(CFG)):
            result = result + (acc[chunk] * factors[:, None],)  # type: ignore[assignment]  # noqa: RUF005
        if count > 0:
            store_half(result, out, places, column, STRIDE_ALIGN, CFG)
        else:
            store_half(result, partial_out, places, column, VALUE_DIM, CFG)
        count = receive_count(memory, message, CFG)
