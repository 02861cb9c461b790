"""Consumer mainloop: one warp group attends 64 packed rows to tiles of keys (S = QKᵀ, online softmax, O += PV).

    group 0   s1=q·k1 acc+=p0·v0 │ softmax 1 ·············· │ s2=q·k2 acc+=p1·v1 │ softmax 2 ··············
    group 1   ··········softmax  │ s1=q·k1 acc+=p0·v0 │ softmax 1 ··············· │ s2=q·k2 acc+=p1·v1 │ ···

Overlap within a warp group (INTRA_WG_OVERLAP): a group issues q·k of the next tile before p·v of the current tile, so
its softmax overlaps its own matrix products. Overlap between warp groups (`uses_pingpong`): two groups issue products
alternately, so the softmax of one overlaps the products of the other.

q, tiles and accumulators consist of one or two column parts (`config.column_parts`); each part has its own product.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .config import (
    acc_layout,
    has_unmasked_loop,
    num_column_parts,
    part_width,
    scores_layout,
    uses_pingpong,
    weights_in_word,
    weights_layout,
)
from .mask import apply_mask
from .mma_e4m3 import interleave_columns, round_weights, rounded_operand
from .pipeline import advance, release, stage_of
from .softmax import (
    apply_soft_cap,
    online_softmax,
    order_before_wait,
    pack_pairs,
    partial_row_sums,
    reduce_row_sum,
    rescale_if_moved,
    score_unit,
)


@gluon.jit
def pingpong_wait(CONSUMER_WG: gl.constexpr):
    """Wait until the other consumer warp group has issued its matrix products.

    The groups use named barriers 8 and 9 of the 16 that a CTA has. The compiler numbers its own barriers from 0 on, one
    a partition, so the numbers do not collide.
    """
    if CONSUMER_WG == 0:
        gl.inline_asm_elementwise("bar.sync 8, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 9, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pingpong_arrive(CONSUMER_WG: gl.constexpr):
    """Let the other warp group issue its products. Group 1 also arrives once at its start, so group 0 issues first."""
    if CONSUMER_WG == 1:
        gl.inline_asm_elementwise("bar.arrive 8, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 9, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_full(full, phase, GATHER_KV: gl.constexpr):
    """Wait until a pipeline stage holds its tile and a matrix product may read it.

    GATHER_KV: cp.async wrote the tile through the generic proxy, and wgmma reads it through the async proxy. Only a
    proxy fence orders these two accesses, so each consumer thread executes one after the barrier.
    """
    mbarrier.wait(full, phase)
    if GATHER_KV:
        fence_async_shared()


@gluon.jit
def issue_qk(q, pipeline, stage, CFG: gl.constexpr):
    """Issue q·kᵀ for the K tile of a pipeline stage; return the scores, ``[64, BLOCK_N]`` float32, not yet complete."""
    keys = stage_of(pipeline.k.tiles, stage)
    s = gl.full([64, CFG.BLOCK_N], 0.0, gl.float32, scores_layout(CFG))
    for part in gl.static_range(num_column_parts(CFG)):
        s = warpgroup_mma(q[part], keys[part].permute((1, 0)), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def compute_scores(q, pipeline, stage, phase, scale, cap, CFG: gl.constexpr):
    """Compute the soft-capped scores of a stage's K tile, without overlap; release the stage."""
    wait_full(pipeline.k.full.index(stage), phase, CFG.GATHER_KV)
    s = issue_qk(q, pipeline, stage, CFG)
    s = warpgroup_mma_wait(0, deps=[s])
    release(pipeline.k.empty.index(stage), CFG)
    return apply_soft_cap(s, scale, cap, CFG.CAP, CFG.ROUNDS)


@gluon.jit
def softmax_of(s, scale, cap, row_max, row_sum, CFG: gl.constexpr):
    """Return the `online_softmax` of soft-capped scores; with ROUNDS `scale` has one value for each row."""
    unit = score_unit(scale, cap, CFG.CAP)
    return online_softmax(s, unit, row_max, row_sum, CFG.ROUNDS, CFG.ROUNDS and not CFG.CAP)


@gluon.jit
def issue_pv(acc, weights, pipeline, stage, phase, CFG: gl.constexpr):
    """Wait for the V tile of a stage and issue acc + p · v; return the accumulators, not yet complete.

    `weights` is p, the softmax probabilities. The operand's layout differs between column parts, but all parts read p
    from the same registers. `wait_pv` keeps these registers unchanged while the products run.
    """
    wait_full(pipeline.v.full.index(stage), phase, CFG.GATHER_KV)
    values, new_acc = stage_of(pipeline.v.tiles, stage), ()
    for part in gl.static_range(num_column_parts(CFG)):
        value = values[part]
        if CFG.ROUNDS:
            own, value = rounded_operand(weights, weights_layout(CFG, part)), value.permute((1, 0))
        else:
            own = gl.convert_layout(weights, weights_layout(CFG, part))
        new_acc = new_acc + (warpgroup_mma(own, value, acc[part], is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
    return new_acc


@gluon.jit
def wait_pv(new_acc, weights):
    """Wait for the p·v products and return the accumulators; the registers of p stay unchanged until then."""
    return warpgroup_mma_wait(0, deps=new_acc + (weights,))[:-1]  # noqa: RUF005


@gluon.jit
def rescale_acc(acc, old_scale, max_moved):
    """Multiply each row's accumulators by `old_scale`, in warps with a new row maximum (`rescale_if_moved`)."""
    return [rescale_if_moved(one, old_scale, max_moved) for one in acc]


@gluon.jit
def mma_operand(p, q, CFG: gl.constexpr):
    """Convert p to q's dtype, which is e4m3 with ROUNDS, and to the register layout of a wgmma A operand."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout(CFG.BLOCK_D, CFG.ROUNDS), weights_in_word(CFG))
    return round_weights(p, operand) if CFG.ROUNDS else pack_pairs(p, q[0].dtype, operand)


@gluon.jit
def mainloop_overlapped(
    acc, row_max, row_sum, weights, q, pipeline, stage, phase, first, stop, row_mask, scale, cap, MASKED: gl.constexpr,
    CFG: gl.constexpr, CONSUMER_WG: gl.constexpr,
):  # fmt: skip
    """Process key tiles [first, stop): the scores of each tile are computed while p·v of the previous tile runs.

    Args:
        weights: p of tile first - 1, with V in pipeline stage `stage`.

    Returns:
        The updated accumulators, row maxima and sums; p of tile stop - 1, not yet multiplied by v; its stage and phase.
    """
    for tile in range(first, stop):
        next_stage, next_phase = advance(stage, phase, CFG.STAGES)
        wait_full(pipeline.k.full.index(next_stage), next_phase, CFG.GATHER_KV)
        if uses_pingpong(CFG):
            pingpong_wait(CONSUMER_WG)
        s = issue_qk(q, pipeline, next_stage, CFG)
        new_acc = issue_pv(acc, weights, pipeline, stage, phase, CFG)
        if uses_pingpong(CFG):
            pingpong_arrive(CONSUMER_WG)
        s = warpgroup_mma_wait(num_column_parts(CFG), deps=[s])
        release(pipeline.k.empty.index(next_stage), CFG)
        s = apply_soft_cap(s, scale, cap, CFG.CAP, CFG.ROUNDS)
        if MASKED:
            s = apply_mask(s, tile, row_mask, CFG)
        p, old_scale, row_max, row_sum, max_moved = softmax_of(s, scale, cap, row_max, row_sum, CFG)
        row_sum = order_before_wait(row_sum)
        acc = wait_pv(new_acc, weights)
        release(pipeline.v.empty.index(stage), CFG)
        acc = rescale_acc(acc, old_scale, max_moved)
        weights = mma_operand(p, q, CFG)
        stage, phase = next_stage, next_phase
    return acc, row_max, row_sum, weights, stage, phase


@gluon.jit
def mainloop_serial(
    acc, row_max, row_sum, q, pipeline, stage, phase, first, stop, row_mask, scale, cap, CFG: gl.constexpr
):
    """Process key tiles [first, stop) without overlap, if other warp groups or CTAs keep the tensor cores busy."""
    for tile in range(first, stop):
        s = apply_mask(compute_scores(q, pipeline, stage, phase, scale, cap, CFG), tile, row_mask, CFG)
        p, old_scale, row_max, row_sum, max_moved = softmax_of(s, scale, cap, row_max, row_sum, CFG)
        weights = mma_operand(p, q, CFG)
        acc = rescale_acc(acc, old_scale, max_moved)
        acc = wait_pv(issue_pv(acc, weights, pipeline, stage, phase, CFG), weights)
        release(pipeline.v.empty.index(stage), CFG)
        stage, phase = advance(stage, phase, CFG.STAGES)
    return acc, row_max, row_sum, stage, phase


@gluon.jit
def zero_acc(CFG: gl.constexpr):
    """Return accumulators of zeros, one for each column part."""
    acc = ()
    for part in gl.static_range(num_column_parts(CFG)):
        zeros = gl.full([64, part_width(CFG, part)], 0.0, gl.float32, acc_layout(part_width(CFG, part), CFG.ROUNDS))
        acc = acc + (zeros,)  # type: ignore[assignment]  # noqa: RUF005
    return acc


@gluon.jit
def mainloop(
    q, pipeline, stage, phase, first, stop, row_mask, scale, cap, CFG: gl.constexpr, CONSUMER_WG: gl.constexpr
):
    """Attend 64 packed rows to key tiles [first, stop) of one request; `row_mask` defines the keys that each row sees.

    Masked and unmasked tiles share one loop, unless `has_unmasked_loop` is True. A second loop means more instructions
    to fetch, and a request with few tiles ends before the second loop saves time (NOTES.md).

    Returns:
        acc, row_max, row_sum, stage, phase: unnormalized output, ``[64, width]`` float32 a column part; maximum and sum
        of each row, ``[64]``; the next pipeline stage and its phase.
    """
    rows: gl.constexpr = gl.SliceLayout(1, scores_layout(CFG))
    acc = zero_acc(CFG)
    row_max = gl.full([64], float("-inf"), gl.float32, rows)
    row_sum = partial_row_sums(gl.full([64, CFG.BLOCK_N], 0.0, gl.float32, scores_layout(CFG)))
    if CFG.INTRA_WG_OVERLAP:
        s = apply_mask(compute_scores(q, pipeline, stage, phase, scale, cap, CFG), first, row_mask, CFG)
        p, old_scale, row_max, row_sum, max_moved = softmax_of(s, scale, cap, row_max, row_sum, CFG)
        weights = mma_operand(p, q, CFG)
        masked_from = first + 1
        if has_unmasked_loop(CFG):
            masked_from = gl.maximum(masked_from, gl.minimum(row_mask.first_masked_tile, stop))
            acc, row_max, row_sum, weights, stage, phase = mainloop_overlapped(
                acc, row_max, row_sum, weights, q, pipeline, stage, phase, first + 1, masked_from, row_mask, scale, cap,
                False, CFG, CONSUMER_WG
            )  # fmt: skip
        acc, row_max, row_sum, weights, stage, phase = mainloop_overlapped(
            acc, row_max, row_sum, weights, q, pipeline, stage, phase, masked_from, stop, row_mask, scale, cap, True,
            CFG, CONSUMER_WG
        )  # fmt: skip
        acc = wait_pv(issue_pv(acc, weights, pipeline, stage, phase, CFG), weights)
        release(pipeline.v.empty.index(stage), CFG)
        stage, phase = advance(stage, phase, CFG.STAGES)
    else:
        acc, row_max, row_sum, stage, phase = mainloop_serial(
            acc, row_max, row_sum, q, pipeline, stage, phase, first, stop, row_mask, scale, cap, CFG
        )  # fmt: skip
    if CFG.ROUNDS:
        acc = [interleave_columns(one) for one in acc]
    return acc, row_max, reduce_row_sum(row_sum, rows), stage, phase
