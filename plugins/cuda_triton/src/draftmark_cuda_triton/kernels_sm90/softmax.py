"""Online softmax of 64 packed rows: the running state is `row_max` and `row_sum`.

A warp raises the `row_max` of its rows only if a tile's maximum exceeds one of them by more than 8 in base-2 units, or
for the first key. Only then are the accumulators rescaled, by 64 instructions a thread for heads of 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def apply_soft_cap(s, scale, cap, CAP: gl.constexpr, BY_ROW: gl.constexpr = False):
    """Apply the soft cap except its factor `cap`: return tanh(scaled score / cap), or `s` unchanged if CAP is False.

    `score_unit` contains the factor. Mask the scores afterwards: tanh turns -inf into a finite number. tanh.approx has
    a relative error of at most 2**-11. Each further instruction in this function slows prefill by several percent.

    Args:
        scale: softmax scale in base-2 units; with BY_ROW one for each row.
    """
    if CAP:
        factor = scale * 0.6931471805599453 / cap
        if BY_ROW:
            factor = factor[:, None]
        s = gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [s * factor], dtype=gl.float32, is_pure=True, pack=1
        )
    return s


@gluon.jit
def score_unit(scale, cap, CAP: gl.constexpr):
    """Return the factor that turns the scores of `apply_soft_cap` into exponents of 2."""
    unit = scale
    if CAP:
        unit = cap * 1.4426950408889634
    return unit


@gluon.jit
def partial_row_sums(p):
    """Sum each row's softmax probabilities p within each thread: ``[rows, 4]``, 4 threads a row, without a shuffle."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def tile_row_max(s):
    """Return the maximum score of each row, reduced as a tree: pairs, then larger groups, then the threads of the row.

    A linear chain of comparisons would take longer, and every softmax probability of the tile waits for the result.
    """
    pairs = gl.max(gl.reshape(s, [s.shape[0], 4, s.shape[1] // 32, 4, 2]), 4)
    own = gl.max(gl.max(pairs, 2), 1)
    return gl.convert_layout(gl.max(own, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def reduce_row_sum(row_sum, rows: gl.constexpr):
    """Sum the `partial_row_sums` of each row over the threads that share the row."""
    return gl.convert_layout(gl.sum(row_sum, 1), rows)


@gluon.constexpr_function
def raise_asm(limit):
    """Return PTX of `raise_row_max`; `limit` is a float32 in PTX's hexadecimal form."""
    return f"""
        {{
            .reg .pred moved;
            .reg .f32 most;
            add.f32 most, $4, {limit};
            setp.gt.f32 moved, $6, most;
            add.f32 most, $5, {limit};
            setp.gt.or.f32 moved, $7, most, moved;
            vote.sync.any.pred moved, moved, 0xffffffff;
            selp.f32 $0, $6, $4, moved;
            selp.f32 $1, $7, $5, moved;
            selp.b32 $2, 1, 0, moved;
            mov.b32 $3, $2;
        }}
        """


@gluon.jit
def raise_row_max(row_max, tile_max, ROUNDS: gl.constexpr = False):
    """Return the new row maxima, and a flag (int32) that is 1 if a row of the warp has a new maximum.

    A maximum is raised if `tile_max` exceeds it by more than 8, or with ROUNDS by more than 1.75. If one row of a warp
    needs this, all rows of the warp are raised, so the warp does not diverge. `pack=2` passes the two rows of a thread.
    """
    LIMIT: gl.constexpr = "0f3FE00000" if ROUNDS else "0f41000000"
    return gl.inline_asm_elementwise(
        raise_asm(LIMIT), "=f,=f,=r,=r,f,f,f,f", [row_max, gl.maximum(row_max, tile_max)],
        dtype=(gl.float32, gl.int32), is_pure=False, pack=2,
    )  # fmt: skip


@gluon.constexpr_function
def rescale_asm(count):
    """Return PTX that multiplies `count` values by `count` factors; a uniform branch skips it if the flag is 0."""
    copies = [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    products = [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    test = [".reg .pred moved;", f"setp.ne.s32 moved, ${3 * count}, 0;"]
    return "\n".join(["{", *test, *copies, "@!moved bra.uni STAY;", *products, "STAY:", "}"])


@gluon.constexpr_function
def rescale_constraints(count):
    """Return the operand constraints of `rescale_asm`."""
    return ",".join(["=f"] * count + ["f"] * (2 * count) + ["r"] * count)


@gluon.jit
def rescale_if_moved(acc, old_scale, max_moved):
    """Multiply accumulators ``[rows, dim]`` by each row's `old_scale` if the warp raised its row maxima."""
    OWN: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    factor = gl.convert_layout(old_scale, gl.SliceLayout(1, acc.type.layout))[:, None]
    flag = gl.convert_layout(max_moved, gl.SliceLayout(1, acc.type.layout))[:, None]
    return gl.inline_asm_elementwise(
        rescale_asm(OWN), rescale_constraints(OWN), [acc, factor, flag], dtype=gl.float32, is_pure=True, pack=OWN
    )


@gluon.jit
def online_softmax(s, unit, row_max, row_sum, ROUNDS: gl.constexpr = False, BY_ROW: gl.constexpr = False):
    """Turn the scores of a tile into p (unnormalized softmax probabilities) and update the running row state.

    Args:
        unit: factor of `score_unit`; with BY_ROW one for each row.
        ROUNDS: p will be rounded to e4m3, so `row_max` is kept 7 below the maximum: p is at most 2**8.75 and e4m3's
            smallest number 2**-9, a weight of 2**-16.

    Returns:
        p, old_scale, row_max, row_sum, max_moved: the probabilities; the factor for the old accumulators, which applies
        only where `max_moved` is set; the updated state.
    """
    tile_max = tile_row_max(s) * unit
    if ROUNDS:
        tile_max -= 7.0
    new_row_max, max_moved = raise_row_max(row_max, tile_max, ROUNDS)
    # If a row has seen no key so far, its row_max is -inf, and -inf - -inf would be NaN.
    pivot = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    unit_of_score = unit
    if BY_ROW:
        unit_of_score = unit[:, None]
    p = gl.exp2(s * unit_of_score - pivot[:, None])
    old_scale = gl.exp2(row_max - pivot)
    row_sum = row_sum * gl.convert_layout(old_scale, gl.SliceLayout(1, row_sum.type.layout))[
        :, None
    ] + partial_row_sums(p)
    return p, old_scale, new_row_max, row_sum, max_moved


@gluon.jit
def order_before_wait(row_sum):
    """Return the sums unchanged, after a branch that is never taken because no sum is negative.

    Without the branch the compiler moves the wait for a matrix product before the exponentials that should overlap it.
    It moves no instruction across a branch, and the sums depend on the exponentials.
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
    """Convert p to 16 bits, two adjacent values in one register, in the layout of a wgmma operand.

    The compiler's own conversion pairs other elements. It would then need one more instruction for each register to
    reorder them, between the issue of one matrix product and the next.
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
    """Return the term that the sink of each row's query head adds to the row sum (`kernels.tile.sink_weight`)."""
    sink = gl.load(sinks + heads, mask=live, other=float("-inf")) * 1.4426950408889634
    return gl.exp2(sink - gl.where(row_max == float("-inf"), 0.0, row_max))
