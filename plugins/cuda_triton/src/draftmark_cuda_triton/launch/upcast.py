"""Launch of `kernels.upcast_kv`: K and V of a prefill over e4m3, written once in q's dtype."""

from __future__ import annotations

import torch
import triton

from ..heuristics.common import next_power_of_two
from ..heuristics.interpreted import INTERPRETED_KEYS
from ..heuristics.upcast import UPCAST_PAGE_SIZE
from ..kernel_variants import kernels, select_variant
from .launcher import launch_kernel
from .operands import AttentionParams

UPCAST_CELLS = 8192
"""Maximum elements of K, and of V, that one program of `upcast_kv.upcast_pages` keeps in registers."""
UPCAST_REQS = 64
"""Preceding requests that an `upcast_pages` program reads in one step, to find its first upcast page."""


def upcast_kv(
    shape: AttentionParams,
    all_heads: int,
    pages_per_request: int,
    k: torch.Tensor,
    v: torch.Tensor,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    upcast_k: torch.Tensor,
    upcast_v: torch.Tensor,
    upcast_table: torch.Tensor,
) -> None:
    """Launch `upcast_kv.upcast_pages`: write K and V of a ragged batch in q's dtype, with a page table.

    Args:
        shape: attention of the group of KV heads to convert.
        all_heads: KV heads of all groups.
        pages_per_request: pages of UPCAST_PAGE_SIZE keys of the longest request, the width of upcast_table.
        upcast_k, upcast_v: ``[pages, UPCAST_PAGE_SIZE, KV heads, head_dim]``, outputs.
        upcast_table: int32 ``[R, pages_per_request]``, output.
    """
    kernel = select_variant(kernels.upcast_kv.upcast_pages, k)
    block = next_power_of_two(all_heads * shape.head_dim)
    # An interpreted program costs milliseconds for any size, so it converts a full page.
    max_tokens = max(1, UPCAST_CELLS // block) if isinstance(kernel, triton.JITFunction) else UPCAST_PAGE_SIZE
    tokens = min(max_tokens, UPCAST_PAGE_SIZE)
    launch_kernel(
        kernel, (pages_per_request * UPCAST_PAGE_SIZE // tokens, prefix_lens.shape[0]), k, v, prefix_lens, q_indptr,
        page_table, upcast_k, upcast_v, upcast_table, pages_per_request, shape.window_left, page_table.stride(0),
        *k.stride()[:3], *v.stride()[:3], shape.num_kv_heads, BLOCK_REQS=UPCAST_REQS, PAGE_SIZE=shape.page_size,
        UPCAST_PAGE_SIZE=UPCAST_PAGE_SIZE, HEAD_DIM=shape.head_dim, WINDOW=shape.window,
        ALIGN_KEYS=INTERPRETED_KEYS, BLOCK=block, BLOCK_TOKENS=tokens,
    )  # fmt: skip
