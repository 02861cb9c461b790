"""Launch of the attention of rows with chosen keys, and of the combine of split lists."""

from __future__ import annotations

import torch
import triton

from ..heuristics.common import KernelConfig, row_tiles
from ..kernel_variants import kernels, select_variant
from .launcher import launch_kernel, pdl_option
from .launches import LOG2E, combine_grid, scaled
from .operands import AttentionParams


def attend_chosen(
    shape: AttentionParams,
    config: KernelConfig,
    num_splits: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    slots: torch.Tensor,
    counts: torch.Tensor,
    q_indptr: torch.Tensor,
    partial_out: torch.Tensor,
    partial_lse: torch.Tensor,
) -> None:
    """Launch `kernels.chosen.attend_chosen`, and the combine if lists are split.

    Args:
        k, v: K and V ``[pages, P, KV heads, elements]``; of a latent layer both parts of the rows.
        slots, counts: int32 ``[rows, chosen_width]`` and ``[rows]``, the lists.
    """
    rows, tiles = len(q), row_tiles(config, 1, shape.group)
    launch_kernel(
        select_variant(kernels.chosen.attend_chosen, q), (rows * tiles, shape.num_kv_heads, num_splits),
        q, k, v, k_scale, v_scale, sinks, out, lse, partial_out, partial_lse, slots, counts, q_indptr,
        len(q_indptr) - 1, slots.shape[1], shape.group, tiles, shape.scale * LOG2E, shape.cap, q.stride(0), q.stride(1),
        out.stride(0), out.stride(1), *k.stride()[:3], *v.stride()[:3], PAGE_SIZE=shape.page_size,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, HEAD_DIM=shape.head_dim, BLOCK_D=shape.block_d,
        VALUE_DIM=shape.value_width, BLOCK_V=shape.block_v, LATENT=shape.latent, CAP=shape.cap > 0,
        SCALED=scaled(k_scale, v_scale), SINKS=sinks is not None, WITH_LSE=lse is not None, SPLIT=num_splits > 1,
        PDL=shape.pdl, STAGES=config.num_stages, num_warps=config.num_warps, num_stages=config.num_stages,
        **pdl_option(shape.pdl),
    )  # fmt: skip
    if num_splits == 1:
        return
    kernel = select_variant(kernels.combine.combine_splits, out)
    compiled = isinstance(kernel, triton.JITFunction)
    blocks, constants = combine_grid(shape, num_splits, shape.group, shape.group, compiled)
    launch_kernel(
        kernel, (blocks, shape.num_kv_heads, rows), partial_out, partial_lse, q_indptr, q_indptr, sinks, out, lse, 1,
        shape.group, num_splits, tiles * config.block_m, out.stride(0), out.stride(1),
        0 if lse is None else lse.stride(0), SINKS=sinks is not None, WITH_LSE=lse is not None, PDL=shape.pdl,
        EVERY_REQUEST=True, num_warps=1, **constants, **pdl_option(shape.pdl),
    )  # fmt: skip
