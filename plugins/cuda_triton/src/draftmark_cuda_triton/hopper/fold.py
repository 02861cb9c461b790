"""The folding role: a warp group folds tiles of keys into the state of 64 packed rows.

    group 0   s1=q·k1 acc+=p0·v0 │ softmax 1 ·············· │ s2=q·k2 acc+=p1·v1 │ softmax 2 ··············
    group 1   ··········softmax  │ s1=q·k1 acc+=p0·v0 │ softmax 1 ··············· │ s2=q·k2 acc+=p1·v1 │ ···

A group asks for a tile's scores before it folds the last tile's values in (OVERLAP), so that its softmax runs beside
its own product; two groups take turns at asking (TURNS), so that it runs beside the other's too.

Rows, tiles and sums come by the parts of their columns (`constants.widths`), a product of each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .constants import output_of, parts_loops, parts_of, scores_of, takes_turns, width_of
from .mask import hide
from .ring import leave, next_slot, of_slot
from .softmax import capped, paired, parts, rescaled, settled, unit_of, weigh, whole


@gluon.jit
def take_turn(MEMBER: gl.constexpr):
    """Wait until the other of two groups has asked for its products.

    Barriers 8 and 9 of a program's 16: the compiler takes those from 0 on, one for each role.
    """
    if MEMBER == 0:
        gl.inline_asm_elementwise("bar.sync 8, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 9, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def give_turn(MEMBER: gl.constexpr):
    """Let the other of two groups ask. Group 1 gives one turn more than it takes: at its start, so that 0 begins."""
    if MEMBER == 1:
        gl.inline_asm_elementwise("bar.arrive 8, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 9, 256; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_for_tile(full, phase, ONE_BY_ONE: gl.constexpr):
    """Wait until a tile is in its slot, and may be read by a product.

    ONE_BY_ONE: threads wrote it as they write shared memory themselves (cp.async); a product reads it as the copy
    engine does. Only a fence orders the two, on either side of the barrier.
    """
    mbarrier.wait(full, phase)
    if ONE_BY_ONE:
        fence_async_shared()


@gluon.jit
def ask_for_scores(q, ring, slot, C: gl.constexpr):
    """q · kᵀ of the tile in a slot."""
    keys = of_slot(ring.k.tiles, slot)
    s = gl.full([64, C.BLOCK_N], 0.0, gl.float32, scores_of(C))
    for part in gl.static_range(parts_of(C)):
        s = warpgroup_mma(q[part], keys[part].permute((1, 0)), s, use_acc=part > 0, is_async=True)
    return s


@gluon.jit
def scores_of_tile(q, ring, slot, phase, scale, cap, C: gl.constexpr):
    """Scores of the tile in a slot, under the soft cap, once it is there; with nothing beside."""
    wait_for_tile(ring.k.full.index(slot), phase, C.ONE_BY_ONE)
    s = ask_for_scores(q, ring, slot, C)
    s = warpgroup_mma_wait(0, deps=[s])
    leave(ring.k.free.index(slot), C)
    return capped(s, scale, cap, C.CAP)


@gluon.jit
def ask_for_sums(acc, weights, ring, slot, phase, C: gl.constexpr):
    """acc + weights · v of the tile in a slot, once it is there.

    Layouts of the parts differ by name: the weights of all are the same registers, which `summed` keeps.
    """
    wait_for_tile(ring.v.full.index(slot), phase, C.ONE_BY_ONE)
    values, folded = of_slot(ring.v.tiles, slot), ()
    for part in gl.static_range(parts_of(C)):
        own = gl.convert_layout(weights, gl.DotOperandLayout(0, output_of(width_of(C, part)), 2))
        folded = folded + (warpgroup_mma(own, values[part], acc[part], is_async=True),)  # type: ignore[assignment]  # noqa: RUF005
    return folded


@gluon.jit
def summed(folded, weights):
    """The sums that were asked for, once they are there; until then the weights stay where they are."""
    return warpgroup_mma_wait(0, deps=folded + (weights,))[:-1]  # noqa: RUF005


@gluon.jit
def rescaled_parts(acc, shrink, moved):
    """Sums times `shrink` of each row; see `softmax.rescaled`."""
    return [rescaled(one, shrink, moved) for one in acc]


@gluon.jit
def operand(p, q, C: gl.constexpr):
    """Weights as the product with a tile's first part takes them."""
    return paired(p, q[0].dtype, gl.DotOperandLayout(0, output_of(C.BLOCK_D), 2))


@gluon.jit
def fold_beside(
    acc, top, mass, weights, q, ring, slot, phase, first, stop, view, scale, cap, MASKED: gl.constexpr, C: gl.constexpr,
    MEMBER: gl.constexpr,
):  # fmt: skip
    """Fold the values of tiles [first - 1, stop - 1) in, whose `weights` are known, and weigh tiles [first, stop)."""
    for tile in range(first, stop):
        next, next_phase = next_slot(slot, phase, C.STAGES)
        wait_for_tile(ring.k.full.index(next), next_phase, C.ONE_BY_ONE)
        if takes_turns(C):
            take_turn(MEMBER)
        s = ask_for_scores(q, ring, next, C)
        folded = ask_for_sums(acc, weights, ring, slot, phase, C)
        if takes_turns(C):
            give_turn(MEMBER)
        s = warpgroup_mma_wait(parts_of(C), deps=[s])
        leave(ring.k.free.index(next), C)
        s = capped(s, scale, cap, C.CAP)
        if MASKED:
            s = hide(s, tile, view, C)
        p, shrink, top, mass, moved = weigh(s, unit_of(scale, cap, C.CAP), top, mass)
        mass = settled(mass)
        acc = summed(folded, weights)
        leave(ring.v.free.index(slot), C)
        acc = rescaled_parts(acc, shrink, moved)
        weights = operand(p, q, C)
        slot, phase = next, next_phase
    return acc, top, mass, weights, slot, phase


@gluon.jit
def fold_in_turn(acc, top, mass, q, ring, slot, phase, first, stop, view, scale, cap, C: gl.constexpr):
    """Fold tiles [first, stop), one step after the other: other warp groups have work for the tensor cores."""
    for tile in range(first, stop):
        s = hide(scores_of_tile(q, ring, slot, phase, scale, cap, C), tile, view, C)
        p, shrink, top, mass, moved = weigh(s, unit_of(scale, cap, C.CAP), top, mass)
        weights = operand(p, q, C)
        acc = rescaled_parts(acc, shrink, moved)
        acc = summed(ask_for_sums(acc, weights, ring, slot, phase, C), weights)
        leave(ring.v.free.index(slot), C)
        slot, phase = next_slot(slot, phase, C.STAGES)
    return acc, top, mass, slot, phase


@gluon.jit
def shared_out(acc, share):
    """Sums times each row's share."""
    return [one * gl.convert_layout(share, gl.SliceLayout(1, one.type.layout))[:, None] for one in acc]


@gluon.jit
def no_sums(C: gl.constexpr):
    """Sums of no tile."""
    acc = ()
    for part in gl.static_range(parts_of(C)):
        acc = acc + (gl.full([64, width_of(C, part)], 0.0, gl.float32, output_of(width_of(C, part))),)  # type: ignore[assignment]  # noqa: RUF005
    return acc


@gluon.jit
def fold_tiles(q, ring, slot, phase, first, stop, view, scale, cap, C: gl.constexpr, MEMBER: gl.constexpr):
    """Fold tiles [first, stop) of one request into 64 rows, of which `view` says what they see (`mask.hide`).

    One loop for tiles that are masked and for those that are not, unless `parts_loops`: code that is there once more is
    read once more, and requests of few tiles end before that has paid (NOTES.md).
    """
    rows: gl.constexpr = gl.SliceLayout(1, scores_of(C))
    acc = no_sums(C)
    top = gl.full([64], float("-inf"), gl.float32, rows)
    mass = parts(gl.full([64, C.BLOCK_N], 0.0, gl.float32, scores_of(C)))
    if C.OVERLAP:
        s = hide(scores_of_tile(q, ring, slot, phase, scale, cap, C), first, view, C)
        p, shrink, top, mass, moved = weigh(s, unit_of(scale, cap, C.CAP), top, mass)
        weights = operand(p, q, C)
        between = first + 1
        if parts_loops(C):
            between = gl.maximum(between, gl.minimum(view.clear, stop))
            acc, top, mass, weights, slot, phase = fold_beside(
                acc, top, mass, weights, q, ring, slot, phase, first + 1, between, view, scale, cap, False, C, MEMBER
            )  # fmt: skip
        acc, top, mass, weights, slot, phase = fold_beside(
            acc, top, mass, weights, q, ring, slot, phase, between, stop, view, scale, cap, True, C, MEMBER
        )  # fmt: skip
        acc = summed(ask_for_sums(acc, weights, ring, slot, phase, C), weights)
        leave(ring.v.free.index(slot), C)
        slot, phase = next_slot(slot, phase, C.STAGES)
    else:
        acc, top, mass, slot, phase = fold_in_turn(
            acc, top, mass, q, ring, slot, phase, first, stop, view, scale, cap, C
        )  # fmt: skip
    return acc, top, whole(mass, rows), slot, phase
