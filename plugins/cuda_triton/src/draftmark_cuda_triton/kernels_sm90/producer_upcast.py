"""Producer partition that upcasts e4m3 tiles of K and V to the dtype of q, from one pipeline into another."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from .config import num_column_parts, part_width, row_copy_layout
from .pipeline import advance


@gluon.jit
def upcast(x, dtype: gl.constexpr):
    """Convert e4m3 to `dtype` exactly, except e4m3's NaN, which becomes 480 in bfloat16.

    For bfloat16 the bits are shifted into place, four values at a time. Their exponents are then too small by 120, so a
    multiplication by 2**120 follows, which is right for subnormals too.
    """
    if dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            """
            {
                .reg .b32 low, high, sign, factor;
                mov.b32 factor, 0x7B807B80;
                prmt.b32 low, $2, 0, 0x1404;
                prmt.b32 high, $2, 0, 0x3424;
                and.b32 sign, low, 0x80008000;
                shr.b32 low, low, 4;
                lop3.b32 low, low, 0x07F007F0, sign, 0xEA;
                mul.rn.bf16x2 $0, low, factor;
                and.b32 sign, high, 0x80008000;
                shr.b32 high, high, 4;
                lop3.b32 high, high, 0x07F007F0, sign, 0xEA;
                mul.rn.bf16x2 $1, high, factor;
            }
            """,
            "=r,=r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return x.to(dtype)


@gluon.jit
def upcast_tile(fp8, fp8_stage, fp8_phase, out, stage, phase, CFG: gl.constexpr):
    """Convert one K or V tile from a stage of the e4m3 pipeline to a stage of the pipeline in q's dtype.

    The e4m3 stage is released only after the converted values are stored. An mbarrier arrival does not wait for
    outstanding loads, and matrix products that saturate shared memory can delay these loads past the next TMA write.
    """
    mbarrier.wait(fp8.full.index(fp8_stage), fp8_phase)
    values = ()
    for part in gl.static_range(num_column_parts(CFG)):
        # With this layout eight threads store one row of 128 bytes. With 16 values a thread, pairs of threads would
        # access the same bank.
        x = fp8.tiles[part].index(fp8_stage).load(row_copy_layout(part_width(CFG, part), gl.num_warps()))
        values = values + (upcast(x, out.tiles[part].dtype),)  # type: ignore[assignment]  # noqa: RUF005
    mbarrier.wait(out.empty.index(stage), phase ^ 1)
    for part in gl.static_range(num_column_parts(CFG)):
        out.tiles[part].index(stage).store(values[part])
    fence_async_shared()
    mbarrier.arrive(out.full.index(stage), count=1)
    mbarrier.arrive(fp8.empty.index(fp8_stage), count=1)


@gluon.jit
def upcast_tiles(fp8, pipeline, fp8_stage, fp8_phase, stage, phase, first, stop, CFG: gl.constexpr):
    """Convert e4m3 key tiles [first, stop) to q's dtype. Each tile is converted once, for any number of rows."""
    for _ in range(first, stop):
        upcast_tile(fp8.k, fp8_stage, fp8_phase, pipeline.k, stage, phase, CFG)
        upcast_tile(fp8.v, fp8_stage, fp8_phase, pipeline.v, stage, phase, CFG)
        fp8_stage, fp8_phase = advance(fp8_stage, fp8_phase, CFG.FP8_STAGES)
        stage, phase = advance(stage, phase, CFG.STAGES)
    return fp8_stage, fp8_phase, stage, phase
