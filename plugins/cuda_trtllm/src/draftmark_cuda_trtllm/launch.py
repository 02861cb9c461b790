"""Our own launches, one function each. Each takes every tensor it touches, so that `record_call` can replay it."""

from __future__ import annotations

import torch
import triton

from .flavours import kernels_for
from .forms import CHUNK

BLOCK = 256
SCAN_CELLS = 16384
"""Cells of a (rows, requests) comparison in one program."""


def next_power_of_two(n: int) -> int:
    """The smallest power of two >= n."""
    return 1 << (n - 1).bit_length()


def write_uniform(
    page_size: int,
    extent: tuple[int, int, int],
    prefix_lens: torch.Tensor,
    page_table: torch.Tensor,
    tree: torch.Tensor | None,
    kv_lens: torch.Tensor,
    slot_mapping: torch.Tensor,
    row_indptr: torch.Tensor | None,
    mask: torch.Tensor | None,
    words: int,
) -> None:
    """Metadata of a uniform batch; `extent` is (q_len, tail_len, lanes). See `kernels.uniform.write_uniform`."""
    q_len, tail_len, lanes = extent
    requests, rows = prefix_lens.shape[0], slot_mapping.shape[0]
    masked = mask is not None
    entries = max(rows * words, requests + 1) if masked else max(rows, requests)
    unused = kv_lens  # a pointer that no branch reads
    kernels_for(kv_lens).write_uniform[(triton.cdiv(entries, BLOCK),)](
        prefix_lens, page_table, unused if tree is None else tree, kv_lens, slot_mapping,
        row_indptr if masked else unused, mask.view(torch.int32) if masked else unused, requests, rows,
        q_len, tail_len, lanes, words, page_table.stride(0), 0 if tree is None else tree.stride(0),
        PAGE=page_size, TREE=tree is not None, MASKED=masked, BLOCK=BLOCK,
    )  # fmt: skip


def write_chunks(
    page_size: int,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    chunk_lens: torch.Tensor,
    chunk_indptr: torch.Tensor,
    chunk_table: torch.Tensor,
    chunk_mask: torch.Tensor,
) -> None:
    """Metadata of an EXTEND for XQA; see `kernels.ragged.write_chunks`."""
    requests, count = prefix_lens.shape[0], chunk_lens.shape[0]
    kernels_for(chunk_lens).write_chunks[(count,)](
        prefix_lens, q_indptr, page_table, slot_mapping, chunk_lens, chunk_indptr, chunk_table, chunk_mask,
        requests, slot_mapping.shape[0], count, page_table.stride(0), chunk_table.stride(0),
        PAGE=page_size, CHUNK=CHUNK, BLOCK_R=max(16, next_power_of_two(requests)), BLOCK_P=512,
    )  # fmt: skip


def write_context(
    page_size: int,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> None:
    """Metadata of an EXTEND for trtllm-gen; see `kernels.ragged.write_context`."""
    requests, rows = prefix_lens.shape[0], slot_mapping.shape[0]
    block_r = max(16, next_power_of_two(requests))
    block = max(1, min(BLOCK, SCAN_CELLS // block_r))
    kernels_for(kv_lens).write_context[(max(1, triton.cdiv(rows, block)),)](
        prefix_lens, q_indptr, page_table, slot_mapping, kv_lens, kv_indptr, requests, rows, page_table.stride(0),
        PAGE=page_size, BLOCK_R=block_r, BLOCK=block,
    )  # fmt: skip


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    """Scatter rows to slots; see `kernels.kv_write.write_rows`."""
    # A row is work enough for a program of a GPU; in the interpreter every program costs a millisecond.
    block_rows = 1 if k.is_cuda else 32
    rows, heads, dim = k.shape
    kernels_for(k).write_rows[(triton.cdiv(rows, block_rows),)](
        k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, rows, *k.stride()[:2], *v.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], NUM_HEADS=heads, HEAD_DIM=dim,
        PAGE=k_cache.shape[1], SCALED=k_scale is not None, BLOCK=next_power_of_two(heads * dim), BLOCK_ROWS=block_rows,
    )  # fmt: skip


def move_rows(source: torch.Tensor, target: torch.Tensor, rows: int, q_len: int, lanes: tuple[int, int]) -> None:
    """Rows between two layouts; `lanes` are the rows a request has in source and target. See `kernels.rows`."""
    elements = source[0].numel()
    block = min(4096, next_power_of_two(elements))
    kernels_for(source).move_rows[(rows, triton.cdiv(elements, block))](
        source, target, q_len, *lanes, elements, BLOCK=block
    )


def write_scale(k_scale: torch.Tensor, v_scale: torch.Tensor, q_scale: torch.Tensor, factor: float) -> None:
    """One float; see `kernels.rows.write_scale`."""
    kernels_for(q_scale).write_scale[(1,)](k_scale, v_scale, q_scale, factor)
