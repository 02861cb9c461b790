"""Conversion of SGLang's KV slots to draftmark's pages, in pure torch.

SGLang stores one KV slot for each token: ``req_to_token[row, position]``. Its paged allocator allocates whole pages of
P slots. So position p of a request is in page ``req_to_token[row, p - p % P] // P`` at offset p % P. The page table
is every P-th column, divided by P.

Row 0 belongs to no request and is zero, and page 0 of the KV pool is SGLang's dummy page. Padding requests point at
row 0, so their page table has null pages only.
"""

from __future__ import annotations

import torch


def write_page_table(out: torch.Tensor, req_to_token: torch.Tensor, rows: torch.Tensor, page_size: int) -> None:
    """Write the page table of a batch. A CUDA graph can capture it; the host reads no tensor.

    Columns past the width of `req_to_token` become 0, the null page. A finished request can still store tokens past its
    row's end, and these tokens must go to the null page (sglang#22778).

    Args:
        out: int32 ``[R, columns]``; every element is written.
        req_to_token: int32 ``[requests, width]``, the KV slot of each position.
        rows: integers ``[R]``, each request's row of `req_to_token`.
        page_size: tokens per page.
    """
    starts = page_starts(req_to_token, page_size, out.shape[1])
    reached = out[:, : starts.shape[1]]
    if page_size == 1:
        torch.index_select(starts, 0, rows, out=reached)
    else:
        torch.div(starts.index_select(0, rows), page_size, rounding_mode="floor", out=reached)
    out[:, starts.shape[1] :].zero_()


def page_starts(req_to_token: torch.Tensor, page_size: int, columns: int) -> torch.Tensor:
    """Return a view of `req_to_token` with only the first slot of each page, ``[requests, …]``.

    Args:
        columns: the most pages per request.
    """
    return req_to_token[:, ::page_size][:, :columns]


def as_pages(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """View a pool's ``[slots, heads, head_dim]`` as pages ``[slots // P, P, heads, head_dim]`` without a copy."""
    pages = buffer.shape[0] // page_size
    return buffer[: pages * page_size].view(pages, page_size, *buffer.shape[1:])
