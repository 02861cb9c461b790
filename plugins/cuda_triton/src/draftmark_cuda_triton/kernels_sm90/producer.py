"""Producer partitions: load K or V by TMA, gather both by cp.async, upcast both from e4m3, or transpose V."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .config import GATHER, LOAD_V, UPCAST
from .mma_e4m3 import transpose_tiles
from .producer_gather import gather_tiles
from .producer_tma import load_tiles
from .producer_upcast import upcast_tiles


@gluon.jit
def produce_tiles(
    k_source, v_source, load_pipeline, pipeline, state, page_row, head, first, stop, first_key, kv_len, num_pages,
    ROLE: gl.constexpr, CFG: gl.constexpr,
):  # fmt: skip
    """Produce the K tiles, the V tiles or both of key tiles [first, stop) of one request, by the partition's ROLE.

    Args:
        k_source, v_source: TMA descriptors for `load_tiles`; for ROLE GATHER the arguments of `gather_tiles`.
        load_pipeline: pipeline that TMA loads into: `pipeline` itself, or a pipeline of e4m3 tiles, which the UPCAST
            partition converts into `pipeline`. With ROUNDS both have the same K, and the partition transposes V.
        first_key: first key that a row of the request sees under its window (`split_kv.first_visible_key`).
        state: stage and phase of `pipeline`, then of `load_pipeline`; the function returns them advanced.
    """
    stage, phase, fp8_stage, fp8_phase = state
    if ROLE == UPCAST and CFG.ROUNDS:
        fp8_stage, fp8_phase, stage, phase = transpose_tiles(
            load_pipeline.v, pipeline.v, fp8_stage, fp8_phase, stage, phase, first, stop, CFG
        )
    elif ROLE == UPCAST:
        fp8_stage, fp8_phase, stage, phase = upcast_tiles(
            load_pipeline, pipeline, fp8_stage, fp8_phase, stage, phase, first, stop, CFG
        )
    elif ROLE == GATHER:
        stage, phase = gather_tiles(
            k_source, v_source, pipeline, stage, phase, page_row, head, first, stop, first_key, kv_len, CFG
        )
    else:
        stage, phase = load_tiles(
            v_source if ROLE == LOAD_V else k_source, load_pipeline, stage, phase, page_row, head, first, stop,
            first_key, kv_len, num_pages, ROLE, CFG,
        )  # fmt: skip
    return stage, phase, fp8_stage, fp8_phase
