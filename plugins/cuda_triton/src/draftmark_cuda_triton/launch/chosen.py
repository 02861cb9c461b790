"""Launch of the attention of rows with chosen keys, and of the combine of split lists."""

from __future__ import annotations

from ..heuristics.common import KernelConfig, row_tiles
from ..kernel_variants import kernels, select_variant
from .attention import LOG2E, generic_constants
from .combine import combine_splits
from .launcher import launch_kernel, pdl_option
from .operands import AttentionParams, ChosenOperands, PartialResults


def attend_chosen(
    shape: AttentionParams,
    config: KernelConfig,
    num_splits: int,
    t: ChosenOperands,
    partials: PartialResults,
) -> None:
    """Launch `kernels.chosen.attend_chosen`, and the combine if lists are split."""
    q, k, v, out = t.q, t.k_source, t.v_source, t.out
    rows, tiles = len(q), row_tiles(config, 1, shape.group)
    launch_kernel(
        select_variant(kernels.chosen.attend_chosen, q), (rows * tiles, shape.num_kv_heads, num_splits),
        q, k, v, t.k_scale, t.v_scale, t.sinks, out, t.lse, partials.out, partials.lse, t.chosen_slots,
        t.chosen_counts, t.q_indptr, len(t.q_indptr) - 1, t.chosen_slots.shape[1], shape.group, tiles,
        shape.scale * LOG2E, shape.cap, q.stride(0), q.stride(1), out.stride(0), out.stride(1), *k.stride()[:3],
        *v.stride()[:3], PAGE_SIZE=shape.page_size, BLOCK_M=config.block_m, BLOCK_N=config.block_n, CAP=shape.cap > 0,
        SINKS=t.sinks is not None, WITH_LSE=t.lse is not None, SPLIT=num_splits > 1, PDL=shape.pdl,
        STAGES=config.num_stages, **generic_constants(shape, config, t), **pdl_option(shape.pdl),
    )  # fmt: skip
    if num_splits > 1:
        combine_splits(
            shape, t, partials._replace(work=t.q_indptr), t.q_indptr, items=rows, parts=num_splits, q_len=1,
            rows=shape.group, most_rows=shape.group, num_splits=num_splits, partial_rows=tiles * config.block_m,
            every_request=True,
        )  # fmt: skip
