"""Online softmax of 64 packed rows: the running state is `row_max` and `row_sum`.

A row's weights stand at a power of two that moves up only when a key weighs 2**8 times as much, or none was seen yet.
Sums in flight are then multiplied, 64 instructions a thread for rows of 128; most tiles leave them as they are.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def apply_soft_cap(s, scale, cap, CAP: gl.constexpr):
    """Scores under the soft cap, if there is one, as shares of it; they are masked afterwards: of -inf it is finite.

    By the one instruction there is for it, which is wrong by 2**-11 of a score at most: a prefill takes several percent
    more of time for each further one (NOTES.md).

    Args:
        scale: to base-2 units (`score_unit`).
    """
    if CAP:
        s = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [s * (scale * 0.6931471805599453 / cap)], dtype=gl.float32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return s


@gluon.jit
def score_unit(scale, cap, CAP: gl.constexpr):
    """What makes `apply_soft_cap` scores exponents of two."""
    unit = scale
    if CAP:
        unit = cap * 1.4426950408889634
    return unit


@gluon.jit
def partial_row_sums(p):
    """Sums ``[rows, 4]`` of the weights that one thread has of each row: nothing is exchanged."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def tile_row_max(s):
    """The largest score of each row: pairs first, then of four at a time.

    One after the other each comparison would wait for the last, before any weight of the tile is known.
    """
    pairs = gl.max(gl.reshape(s, [s.shape[0], 4, s.shape[1] // 32, 4, 2]), 4)
    own = gl.max(gl.max(pairs, 2), 1)
    return gl.convert_layout(gl.max(own, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def reduce_row_sum(row_sum, rows: gl.constexpr):
    """The sum of each row, of its `partial_row_sums`."""
    return gl.convert_layout(gl.sum(row_sum, 1), rows)


@gluon.jit
def raise_row_max(row_max, tile_max):
    """Where weights stand once keys of the weight `tile_max` came, and whether a row of the warp has moved, int32.

    The rows of a warp move together, so that none of its threads waits for another. `pack=2`: both rows of a thread.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred moved;
            .reg .f32 most;
            add.f32 most, $4, 0f41000000;
            setp.gt.f32 moved, $6, most;
            add.f32 most, $5, 0f41000000;
            setp.gt.or.f32 moved, $7, most, moved;
            vote.sync.any.pred moved, moved, 0xffffffff;
            selp.f32 $0, $6, $4, moved;
            selp.f32 $1, $7, $5, moved;
            selp.b32 $2, 1, 0, moved;
            mov.b32 $3, $2;
        }
        """,
        "=f,=f,=r,=r,f,f,f,f", [row_max, gl.maximum(row_max, tile_max)], dtype=(gl.float32, gl.int32), is_pure=False,
        pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def rescale_asm(count):
    """`count` values times as many factors, unless the first of as many flags is 0, in one branch of a warp."""
    copies = [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    products = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    test = [".reg .pred moved;", f"setp.ne.s32 moved, ${3 * count}, 0;"]
    return "\n".join(["{", *test, *copies, "@!moved bra.uni STAY;", *products, "STAY:", "}"])


@gluon.constexpr_function
def rescale_constraints(count):
    """Constraints of `rescale_asm`."""
    return ",".join(["=f"] * count + ["f"] * (2 * count) + ["r"] * count)


@gluon.jit
def rescale_if_moved(acc, old_scale, max_moved):
    """Sums ``[rows, dim]`` times `old_scale` of each row, where a row of the warp has moved."""
    OWN: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    factor = gl.convert_layout(old_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    flag = gl.convert_layout(max_moved, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        rescale_asm(OWN), rescale_constraints(OWN), [acc, factor, flag], dtype=gl.float32, is_pure=True, pack=OWN
    )


@gluon.jit
def online_softmax(s, unit, row_max, row_sum):
    """Scores to weights, and the rows' state; `old_scale` is what old sums are multiplied by where `max_moved`.

    Args:
        unit: of `score_unit`.
    """
    new_row_max, max_moved = raise_row_max(row_max, tile_row_max(s) * unit)
    # A row that has seen no key yet: -inf - -inf would be NaN.
    pivot = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    p = gl.exp2(s * unit - pivot[:, None])
    old_scale = gl.exp2(row_max - pivot)
    row_sum = row_sum * gl.convert_layout(old_scale, gl.SliceLayout(1, row_sum.type.layout))[
        :, None
    ] + partial_row_sums(p)
    return p, old_scale, new_row_max, row_sum, max_moved


@gluon.jit
def order_before_wait(row_sum):
    """The same sums, behind a branch that is never taken, for no sum is negative.

    The compiler would move the wait for a product before the exponentials that are to run beside it; it moves nothing
    over a branch, and what the sums are made of comes before this one. NOTES.md has what that is worth.
    """
    return gl.inline_asm_elementwise(
        """
        {
            .reg .pred never;
            mov.f32 $0, $2;
            mov.f32 $1, $3;
            setp.lt.f32 never, $2, 0fBF800000;
            vote.sync.any.pred never, never, 0xffffffff;
            @!never bra.uni ON;
            STAY: nanosleep.u32 1000;
            bra.uni STAY;
            ON:
        }
        """,
        "=f,=f,f,f", [row_sum], dtype=gl.float32, is_pure=False, pack=2,
    )  # fmt: skip


@gluon.jit
def pack_pairs(p, dtype: gl.constexpr, operand: gl.constexpr):
    """Weights as a product takes them, two neighbours in a register.

    Of single values the compiler makes pairs as it likes, and swaps them back, one instruction each, between a product
    that was asked for and the next.
    """
    if dtype == gl.bfloat16:
        weights = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        weights = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.float16, is_pure=True, pack=2
        )
    return gl.convert_layout(weights, operand)


@gluon.jit
def sink_weight(sinks, heads, live, row_max):
    """What the sinks of query heads add to the mass of rows; see `kernels.tile.sink_weight`."""
    sink = gl.load(sinks + heads, mask=live, other=float("-inf")) * 1.4426950408889634
    return gl.exp2(sink - gl.where(row_max == float("-inf"), 0.0, row_max))
