"""Launches of the plugin's own kernels. A function takes every tensor that it uses, so `record_call` can replay it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton

from draftmark import Geometry
from draftmark.runtime import ForwardBatch, record_call
from draftmark_cuda_triton.shared import compiled_or_interpreted

from .sizing import PAGES

KERNELS = f"{__package__}.kernels"
BLOCK = 256
SCAN_CELLS = 16384
"""Most cells of one program's (rows, requests) comparison."""


def visible_table(geometry: Geometry, buffers: Mapping[str, torch.Tensor], batch: ForwardBatch) -> torch.Tensor:
    """Return the page table that the vendor's kernels read: a buffer for a layer with a window, else the batch's."""
    if geometry.attention.window_left < 0:
        return batch.page_table
    return buffers[PAGES][: batch.padded_reqs]


def hide_pages(geometry: Geometry, batch: ForwardBatch, out: torch.Tensor) -> None:
    """Write `visible_table` of a batch, if the layer has a window."""
    a = geometry.attention
    if a.window_left >= 0:
        record_call(
            write_visible_table, a.page_size, a.window_left, batch.prefix_lens, batch.page_table, out, mutates=(out,)
        )


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two >= n."""
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
    """Write a uniform batch's metadata. See `kernels.uniform.write_uniform`.

    Args:
        extent: (rows per request, tail slots per request, rows per request in XQA's layout with padding).
    """
    q_len, tail_len, lanes = extent
    requests, rows = prefix_lens.shape[0], slot_mapping.shape[0]
    masked = mask is not None
    entries = max(rows * words, requests + 1) if masked else max(rows, requests)
    unused = kv_lens  # passed for absent tensors: a kernel needs some pointer, which no branch reads then
    compiled_or_interpreted(kv_lens, KERNELS).uniform.write_uniform[(triton.cdiv(entries, BLOCK),)](
        prefix_lens, page_table, unused if tree is None else tree, kv_lens, slot_mapping,
        row_indptr if masked else unused, unused if mask is None else mask.view(torch.int32), requests, rows,
        q_len, tail_len, lanes, words, page_table.stride(0), 0 if tree is None else tree.stride(0),
        PAGE=page_size, TREE=tree is not None, MASKED=masked, BLOCK=BLOCK,
    )  # fmt: skip


def write_visible_table(
    page_size: int, window_left: int, prefix_lens: torch.Tensor, page_table: torch.Tensor, out: torch.Tensor
) -> None:
    """Write the page table of a layer with a window. See `kernels.table.write_visible_table`."""
    requests, columns = out.shape
    compiled_or_interpreted(out, KERNELS).table.write_visible_table[(triton.cdiv(columns, BLOCK), requests)](
        prefix_lens, page_table, out, columns, window_left, page_table.stride(0), PAGE=page_size, BLOCK=BLOCK
    )


def write_context(
    page_size: int,
    prefix_lens: torch.Tensor,
    q_indptr: torch.Tensor,
    page_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_lens: torch.Tensor,
    kv_indptr: torch.Tensor,
) -> None:
    """Write the metadata of an EXTEND batch for trtllm-gen. See `kernels.context.write_context`."""
    requests, rows = prefix_lens.shape[0], slot_mapping.shape[0]
    block_r = max(16, next_power_of_two(requests))
    block = max(1, min(BLOCK, SCAN_CELLS // block_r))
    compiled_or_interpreted(kv_lens, KERNELS).context.write_context[(max(1, triton.cdiv(rows, block)),)](
        prefix_lens, q_indptr, page_table, slot_mapping, kv_lens, kv_indptr, requests, rows, page_table.stride(0),
        PAGE=page_size, BLOCK_R=block_r, BLOCK=block,
    )  # fmt: skip


def move_rows(source: torch.Tensor, target: torch.Tensor, rows: int, q_len: int, lanes: tuple[int, int]) -> None:
    """Copy the first q_len rows of each request from source to target. See `kernels.rows.move_rows`.

    Args:
        lanes: rows per request, padding included, in (source, target).
    """
    elements = source[0].numel()
    block = min(4096, next_power_of_two(elements))
    compiled_or_interpreted(source, KERNELS).rows.move_rows[(rows, triton.cdiv(elements, block))](
        source, target, q_len, *lanes, elements, BLOCK=block
    )


def write_scale(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, q_scale: torch.Tensor, factor: float
) -> None:
    """Write XQA's scale of the queries, one float; a scale of None counts as 1. See `kernels.rows.write_scale`."""
    compiled_or_interpreted(q_scale, KERNELS).rows.write_scale[(1,)](
        q_scale if k_scale is None else k_scale, q_scale if v_scale is None else v_scale, q_scale, factor,
        HAS_K=k_scale is not None, HAS_V=v_scale is not None,
    )  # fmt: skip


def write_latent_rows(k: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Store latent rows k ``[rows, 1, head_dim]`` at their slots. See `kernels.rows.write_latent_rows`."""
    rows, _, width = k.shape
    if rows:
        compiled_or_interpreted(k, KERNELS).rows.write_latent_rows[(rows,)](
            k, cache, slots, k.stride(0), ROW=width, BLOCK=next_power_of_two(width)
        )
