"""Matrix products of e4m3 by e4m3: q and the softmax probabilities (p) are rounded, K and V are multiplied as stored.

    q [64, d]    each packed row is scaled by a power of two and rounded to e4m3     S = Q · Kᵀ, both from shared memory
    V [keys, d]  ldmatrix.trans  bytes of four keys in a register  Vᵀ [d, keys]      O += P · V, P from registers

wgmma reads e4m3 operands only with adjacent elements along the summed dimension, which is `keys` for V. So producer
warps transpose each tile of V in shared memory. Two orders are free, and they save every shuffle:

* A thread of the scores holds keys 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16, and an e4m3 operand holds four adjacent
  ones. The transposed tile has its keys in the order of the scores.
* ldmatrix reads d = 2n and 2n + 1 as one element. The transposed tile has all even d before all odd d, and
  `interleave_columns` names the accumulator's columns in their own order again.

p is at most 2**8.75 (`softmax.online_softmax`), close to the largest e4m3 value, 448.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .config import num_column_parts, part_width
from .gluon_compat import reinterpret, thread_barrier
from .pipeline import advance


@gluon.constexpr_function
def pairs_layout(pairs, keys):
    """Return the layout in which four warps read a V tile as ``[d / 2, keys]`` elements of 16 bits, by ldmatrix.trans.

    The four elements that one e4m3 register takes are adjacent registers: keys 2t, 2t + 1, 2t + 8 and 2t + 9.
    """
    far = [[0, 1 << bit] for bit in range(4, keys.bit_length() - 1)]
    warps = [[16, 0], [32, 0] if pairs == 64 else far.pop()]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 8], [8, 0], *far], lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=warps, block_bases=[], shape=[pairs, keys],
    )  # fmt: skip


@gluon.jit
def in_operand_order(x):
    """Rename the keys (columns) of each 16 from the order of the scores' registers to that of an e4m3 operand."""
    ROWS: gl.constexpr = x.shape[0]
    KEYS: gl.constexpr = x.shape[1]
    return gl.reshape(gl.permute(gl.reshape(x, [ROWS, KEYS // 16, 2, 4, 2]), (0, 1, 3, 2, 4)), [ROWS, KEYS])


@gluon.jit
def interleave_columns(acc):
    """Rename accumulator columns: all even d, then all odd d, become d in order."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    return gl.reshape(gl.permute(gl.reshape(acc, [ROWS, 2, WIDTH // 2]), (0, 2, 1)), [ROWS, WIDTH])


@gluon.jit
def round_weights(p, operand: gl.constexpr):
    """Round p ``[rows, keys]`` to e4m3; return int32 ``[rows, keys / 4]``, four values in one register.

    A loop would carry values of 8 bits one by one, with an instruction for each to take it out of its register.
    """
    ROWS: gl.constexpr = p.shape[0]
    KEYS: gl.constexpr = p.shape[1]
    own = gl.convert_layout(in_operand_order(p), operand)
    even, odd = gl.split(gl.reshape(own, [ROWS, KEYS // 4, 2, 2]))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return gl.inline_asm_elementwise(
        """
        {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
        }
        """,
        "=r,f,f,f,f", [first, second, third, fourth], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def rounded_operand(words, operand: gl.constexpr):
    """Return the e4m3 values of `round_weights` as a wgmma A operand, in the same registers."""
    first, second = (words & 255).to(gl.int8), ((words >> 8) & 255).to(gl.int8)
    third, fourth = ((words >> 16) & 255).to(gl.int8), ((words >> 24) & 255).to(gl.int8)
    values = gl.reshape(gl.join(gl.join(first, third), gl.join(second, fourth)), [words.shape[0], 4 * words.shape[1]])
    return gl.convert_layout(values.to(gl.float8e4nv, bitcast=True), operand)


@gluon.jit
def split_pairs(pairs, dtype: gl.constexpr):
    """Convert pairs of 16-bit values in int32 to two float32 tensors: even columns and odd columns."""
    if dtype == gl.bfloat16:
        return (pairs << 16).to(gl.float32, bitcast=True), (pairs & -65536).to(gl.float32, bitcast=True)
    else:
        low, high = pairs.to(gl.int16), (pairs >> 16).to(gl.int16)
        return low.to(dtype, bitcast=True).to(gl.float32), high.to(dtype, bitcast=True).to(gl.float32)


@gluon.jit
def rounded_rows(smem, CFG: gl.constexpr):
    """View the first half of a warp group's rows of q, 16-bit elements, as e4m3 rows: a list of column parts."""
    views = ()
    for part in gl.static_range(num_column_parts(CFG)):
        WIDTH: gl.constexpr = part_width(CFG, part)
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, WIDTH], gl.float8e4nv)
        views = views + (reinterpret(smem[part], gl.float8e4nv, [2, 64, WIDTH], layout).index(0),)  # type: ignore[assignment]  # noqa: RUF005
    return views


@gluon.jit
def store_q_rounded(smem, queries, dtype: gl.constexpr, CFG: gl.constexpr):
    """Round packed rows of q to e4m3 and store them to a warp group's shared memory; return a factor for each row.

    A row's factor is a power of two, so that its largest element has exponent 7; the largest exponent of e4m3 is 8. It
    is NaN for a row with an infinity or NaN.

    Args:
        queries: rows as `pack_gqa.load_q` returns them.
        dtype: their dtype, bfloat16 or float16.
    """
    largest = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, queries[0].type.layout))
    finite = gl.full([64], 1, gl.int32, gl.SliceLayout(1, queries[0].type.layout))
    for part in gl.static_range(num_column_parts(CFG)):
        low, high = split_pairs(queries[part], dtype)
        own = gl.maximum(gl.abs(low), gl.abs(high))
        largest = gl.maximum(largest, gl.convert_layout(gl.max(own, 1), largest.type.layout))
        kept = (gl.abs(low) < float("inf")) & (gl.abs(high) < float("inf"))
        finite = finite & gl.convert_layout(gl.min(kept.to(gl.int32), 1), finite.type.layout)
    # Rows below 2**-63 keep that row's factor: a factor of 0, after the softmax scale, would make masked scores NaN.
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 64)
    factor = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
    rounded = rounded_rows(smem, CFG)
    thread_barrier()
    for part in gl.static_range(num_column_parts(CFG)):
        low, high = split_pairs(queries[part], dtype)
        own = gl.convert_layout(factor, gl.SliceLayout(1, low.type.layout))[:, None]
        values = gl.reshape(gl.join(low * own, high * own), [64, part_width(CFG, part)])
        rounded[part].store(values.to(gl.float8e4nv))
    fence_async_shared()
    thread_barrier()
    return gl.where(finite > 0, ((exponent - 7) << 23).to(gl.float32, bitcast=True), float("nan"))


@gluon.jit
def transpose_tile(x, out):
    """Write a V tile, read as pairs of d (`pairs_layout`), to shared memory ``[d, keys]``: even d, then odd d."""
    PAIRS: gl.constexpr = x.shape[0]
    even, odd = gl.inline_asm_elementwise(
        "prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;", "=r,=r,r,r", [x],
        dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4,
    )  # fmt: skip
    out.slice(0, PAIRS).store(in_operand_order(even))
    out.slice(PAIRS, PAIRS).store(in_operand_order(odd))


@gluon.jit
def transpose_tiles(loaded, transposed, loaded_stage, loaded_phase, stage, phase, first, stop, CFG: gl.constexpr):
    """Transpose the V tiles [first, stop) of a request, from one pipeline into another; return stages and phases.

    A loaded stage is released only after its transposed values are stored: an mbarrier arrival does not wait for
    outstanding loads.
    """
    for _ in range(first, stop):
        mbarrier.wait(loaded.full.index(loaded_stage), loaded_phase)
        values = ()
        for part in gl.static_range(num_column_parts(CFG)):
            layout: gl.constexpr = pairs_layout(part_width(CFG, part) // 2, CFG.BLOCK_N)
            x = loaded.tiles[part].index(loaded_stage).permute((1, 0)).load(layout)
            values = values + (x,)  # type: ignore[assignment]  # noqa: RUF005
        mbarrier.wait(transposed.empty.index(stage), phase ^ 1)
        for part in gl.static_range(num_column_parts(CFG)):
            transpose_tile(values[part], transposed.tiles[part].index(stage))
        fence_async_shared()
        mbarrier.arrive(transposed.full.index(stage), count=1)
        mbarrier.arrive(loaded.empty.index(loaded_stage), count=1)
        loaded_stage, loaded_phase = advance(loaded_stage, loaded_phase, CFG.FP8_STAGES)
        stage, phase = advance(stage, phase, CFG.STAGES)
    return loaded_stage, loaded_phase, stage, phase
