"""Consumer mainloop: one warp group attends 64 packed rows to tiles of keys (S = QKᵀ, online softmax, O += PV).

    group 0   s1=q·k1 acc+=p0·v0 │ softmax 1 ·············· │ s2=q·k2 acc+=p1·v1 │ softmax 2 ··············
    group 1   ··········softmax  │ s1=q·k1 acc+=p0·v0 │ softmax 1 ··············· │ s2=q·k2 acc+=p1·v1 │ ···

A group asks for a tile's scores before it folds the last tile's values in (INTRA_WG_OVERLAP), so that its softmax runs
beside its own product; two groups take turns at asking (TURNS), so that it runs beside the other's too.

Rows, tiles and sums come by the parts of their columns (`config.column_parts`), a product of each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .config import acc_layout, has_unmasked_loop, num_column_parts, part_width, scores_layout, uses_pingpong
from .mask import apply_mask
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
    """Wait until the other of two groups has asked for its products.

    Barriers 8 and 9 of a program's 16: the compiler takes those from 0 on, one for each role.
    """
    if CONSUMER_WG == 0:
        gl.inline_asm_elementwise("bar.sync 8, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 9, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pingpong_arrive(CONSUMER_WG: gl.constexpr):
    """Let the other of two groups ask. Group 1 gives one turn more than it takes: at its start, so that 0 begins."""
    if CONSUMER_WG == 1:
        gl.inline_asm_elementwise("bar.arrive 8, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 9, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_full(full, phase, GATHER_KV: gl.constexpr):
    """Wait until a tile is in its slot, and may be read by a product.

    GATHER_KV: threads wrote it as they write shared memory themselves (cp.async); a product reads it as the copy
    engine does. Only a fence orders the two, on either side of the barrier.
    """
    mbarrier.wait(full, phase)
    if GATHER_KV:
        fence_async_shared()


@gluon.jit
def issue_qk(q, pipeline, stage, CFG: gl.constexpr):
    """q · kᵀ of the tile in a slot."""
    keys = stage_of(pipeline.k.tiles, stage)
    s = gl.full([64, CFG.BLOCK_N], 0.0, gl.float32, scores_layout(CFG))
    for part in gl.static_range(num_column_parts(CFG)):
        s = warpgroup_mma(q[part], keys[part].permute((1, 0)), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def compute_scores(q, pipeline, stage, phase, scale, cap, CFG: gl.constexpr):
    """Scores of the tile in a slot, under the soft cap, once it is there; with nothing beside."""
    wait_full(pipeline.k.full.index(stage), phase, CFG.GATHER_KV)
    s = issue_qk(q, pipeline, stage, CFG)
    s = warpgroup_mma_wait(0, deps=[s])
    release(pipeline.k.empty.index(stage), CFG)
    return apply_soft_cap(s, scale, cap, CFG.CAP)


@gluon.jit
def issue_pv(acc, weights, pipeline, stage, phase, CFG: gl.constexpr):
    """acc + weights · v of the tile in a slot, once it is there.

    Layouts of the parts differ by name: the weights of all are the same registers, which `wait_pv` keeps.
    """
    wait_full(pipeline.v.full.index(stage), phase, CFG.GATHER_KV)
    values, new_acc = stage_of(pipeline.v.tiles, stage), ()
    for part in gl.static_range(num_column_parts(CFG)):
        own = gl.convert_layout(weights, gl.DotOperandLayout(0, acc_layout(part_width(CFG, part)), 2))
        new_acc = new_acc + (warpgroup_mma(own, values[part], acc[part], is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
    return new_acc


@gluon.jit
def wait_pv(new_acc, weights):
    """The sums that were asked for, once they are there; until then the weights stay where they are."""
    return warpgroup_mma_wait(0, deps=new_acc + (weights,))[:-1]  # noqa: RUF005


@gluon.jit
def rescale_acc(acc, old_scale, max_moved):
    """Sums times `old_scale` of each row; see `softmax.rescale_if_moved`."""
    return [rescale_if_moved(one, old_scale, max_moved) for one in acc]


@gluon.jit
def mma_operand(p, q, CFG: gl.constexpr):
    """Weights as the product with a tile's first part takes them."""
    return pack_pairs(p, q[0].dtype, gl.DotOperandLayout(0, acc_layout(CFG.BLOCK_D), 2))


@gluon.jit
def mainloop_overlapped(
    acc, row_max, row_sum, weights, q, pipeline, stage, phase, first, stop, row_mask, scale, cap, MASKED: gl.constexpr,
    CFG: gl.constexpr, CONSUMER_WG: gl.constexpr,
):  # fmt: skip
    """Fold the values of tiles [first - 1, stop - 1) in, whose `weights` are known, and weigh tiles [first, stop)."""
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
        s = apply_soft_cap(s, scale, cap, CFG.CAP)
        if MASKED:
            s = apply_mask(s, tile, row_mask, CFG)
        p, old_scale, row_max, row_sum, max_moved = online_softmax(s, score_unit(scale, cap, CFG.CAP), row_max, row_sum)
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
    """Fold tiles [first, stop), one step after the other: other warp groups have work for the tensor cores."""
    for tile in range(first, stop):
        s = apply_mask(compute_scores(q, pipeline, stage, phase, scale, cap, CFG), tile, row_mask, CFG)
        p, old_scale, row_max, row_sum, max_moved = online_softmax(s, score_unit(scale, cap, CFG.CAP), row_max, row_sum)
        weights = mma_operand(p, q, CFG)
        acc = rescale_acc(acc, old_scale, max_moved)
        acc = wait_pv(issue_pv(acc, weights, pipeline, stage, phase, CFG), weights)
        release(pipeline.v.empty.index(stage), CFG)
        stage, phase = advance(stage, phase, CFG.STAGES)
    return acc, row_max, row_sum, stage, phase


@gluon.jit
def zero_acc(CFG: gl.constexpr):
    """Sums of no tile."""
    acc = ()
    for part in gl.static_range(num_column_parts(CFG)):
        acc = acc + (gl.full([64, part_width(CFG, part)], 0.0, gl.float32, acc_layout(part_width(CFG, part))),)  # type: ignore[assignment]  # noqa: RUF005
    return acc


@gluon.jit
def mainloop(
    q, pipeline, stage, phase, first, stop, row_mask, scale, cap, CFG: gl.constexpr, CONSUMER_WG: gl.constexpr
):
    """Fold tiles [first, stop) of one request into 64 rows, of which `row_mask` says what they see (`mask.apply_mask`).

    One loop for tiles that are masked and for those that are not, unless `has_unmasked_loop`: code that is there once
    more is read once more, and requests of few tiles end before that has paid (NOTES.md).
    """
    rows: gl.constexpr = gl.SliceLayout(1, scores_layout(CFG))
    acc = zero_acc(CFG)
    row_max = gl.full([64], float("-inf"), gl.float32, rows)
    row_sum = partial_row_sums(gl.full([64, CFG.BLOCK_N], 0.0, gl.float32, scores_layout(CFG)))
    if CFG.INTRA_WG_OVERLAP:
        s = apply_mask(compute_scores(q, pipeline, stage, phase, scale, cap, CFG), first, row_mask, CFG)
        p, old_scale, row_max, row_sum, max_moved = online_softmax(s, score_unit(scale, cap, CFG.CAP), row_max, row_sum)
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
    return acc, row_max, reduce_row_sum(row_sum, rows), stage, phase
