"""From SGLang's token slots to draftmark's pages. Pure torch: SGLang is not needed here.

SGLang names KV by slot: ``req_to_token[row, position]``. Its paged allocator hands out whole pages, so position p of
a request lies in page ``req_to_token[row, p - p % P] // P`` at offset p % P, and every P-th column is the page
table. Row 0 belongs to no request and is zero, and page 0 of the KV pool is SGLang's dummy page: padded requests,
which point at row 0, have null pages by themselves.
"""

from __future__ import annotations

import torch


def write_page_table(out: torch.Tensor, req_to_token: torch.Tensor, rows: torch.Tensor, page_size: int) -> None:
    """Fill the page table of a batch. Capturable; no host read.

    Columns that `req_to_token` does not reach become 0, the null page: a row is as wide as its engine made it, and
    what a finished request still has in flight behind that wall must go nowhere (sglang#22778).

    Args:
        out: int32 ``[R, columns]``, written whole.
        req_to_token: int32 ``[requests, width]``, the KV slot of each position.
        rows: integers ``[R]``, each request's row.
    """
    starts = page_starts(req_to_token, page_size, out.shape[1])
    reached = out[:, : starts.shape[1]]
    if page_size == 1:
        torch.index_select(starts, 0, rows, out=reached)
    else:
        torch.div(starts.index_select(0, rows), page_size, rounding_mode="floor", out=reached)
    out[:, starts.shape[1] :].zero_()


def page_starts(req_to_token: torch.Tensor, page_size: int, columns: int) -> torch.Tensor:
    """View the slots with which pages begin, ``[requests, …]``, of at most so many pages a request."""
    return req_to_token[:, ::page_size][:, :columns]


def as_pages(buffer: torch.Tensor, page_size: int) -> torch.Tensor:
    """View a pool's ``[slots, heads, head_dim]`` as pages ``[slots // P, P, heads, head_dim]``, without a copy."""
    pages = buffer.shape[0] // page_size
    return buffer[: pages * page_size].view(pages, page_size, *buffer.shape[1:])
