"""Upcast K and V of a ragged batch from e4m3 to the dtype of q, exactly, once for all row tiles. One launch.

    grid (tokens of a request / BLOCK_TOKENS, requests): a program converts BLOCK_TOKENS tokens of all KV heads.

The result is a separate paged cache with a new page table. For each request it holds the keys from the start of the
first row's window on, rounded down to a multiple of ALIGN_KEYS. The pages of a request follow the pages of the request
before it. Example: one request of 32,768 tokens, 8 heads of 128, bf16. 64 MiB read and 128 MiB written take 50 µs at 4
TB/s.
"""

import triton
import triton.language as tl

from .inline import bound, inline
from .reduce import total


@inline
def upcast_range(prefix_lens, q_indptr, request, live, window_left, WINDOW: tl.constexpr, ALIGN_KEYS: tl.constexpr):
    """Return the keys [begin, stop) to upcast for one request or a vector of them; empty for requests without rows."""
    rows = tl.load(q_indptr + request + 1, mask=live, other=0) - tl.load(q_indptr + request, mask=live, other=0)
    prefix_len = tl.load(prefix_lens + request, mask=live, other=0)
    stop = tl.where(rows > 0, prefix_len + rows, 0)
    begin = stop * 0
    if WINDOW:
        begin = tl.minimum(tl.maximum(prefix_len - window_left, 0), stop) // ALIGN_KEYS * ALIGN_KEYS
    return begin, stop


@triton.jit(
    do_not_specialize=["pages_per_request", "window_left", "stride_table", "num_heads"],
    do_not_specialize_on_alignment=["prefix_lens", "q_indptr", "page_table", "upcast_table"],
)
def upcast_pages(
    k_source,
    v_source,
    prefix_lens,
    q_indptr,
    page_table,
    upcast_k,
    upcast_v,
    upcast_table,
    pages_per_request,
    window_left,
    stride_table,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    num_heads,
    BLOCK_REQS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    UPCAST_PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    ALIGN_KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Convert K and V of a batch to the dtype of upcast_k and upcast_v, and write their page table.

    Keys after a request's last token and before the window of its first row are not written. The first written key is
    rounded down to a multiple of ALIGN_KEYS, so that a key tile begins there. Keys before the window are written as
    zeros: their pages may belong to another request. Requests without rows have no pages.

    Args:
        upcast_k, upcast_v: ``[pages, UPCAST_PAGE_SIZE, heads, dim]``, out.
        upcast_table: int32 ``[requests, pages_per_request]``, out.
        num_heads: KV heads of the group to convert. BLOCK covers all KV heads of the geometry, so that one compiled
            kernel serves every group.
    """
    request = tl.program_id(1)
    first = tl.program_id(0) * BLOCK_TOKENS
    begin, stop = upcast_range(prefix_lens, q_indptr, request, request >= 0, window_left, WINDOW, ALIGN_KEYS)
    page = first // UPCAST_PAGE_SIZE - begin // UPCAST_PAGE_SIZE
    if (first < stop) & (page >= 0):
        for other in range(0, bound(request), BLOCK_REQS):
            others = other + tl.arange(0, BLOCK_REQS)
            begins, stops = upcast_range(
                prefix_lens, q_indptr, others, others < request, window_left, WINDOW, ALIGN_KEYS
            )
            page += total((stops + UPCAST_PAGE_SIZE - 1) // UPCAST_PAGE_SIZE - begins // UPCAST_PAGE_SIZE, 0)
        if first % UPCAST_PAGE_SIZE == 0:
            tl.store(upcast_table + request * pages_per_request + first // UPCAST_PAGE_SIZE, page)
        position = first + tl.arange(0, BLOCK_TOKENS)
        element = tl.arange(0, BLOCK)
        live = (position < stop)[:, None] & (element < num_heads * HEAD_DIM)[None, :]
        head, dim = (element // HEAD_DIM)[None, :], (element % HEAD_DIM)[None, :]
        row = page_table + request.to(tl.int64) * stride_table
        stored = position < stop
        if WINDOW:
            stored = stored & (position >= tl.load(prefix_lens + request) - window_left)
        source = tl.load(row + position // PAGE_SIZE, mask=stored, other=0).to(tl.int64)[:, None]
        slot = (position % PAGE_SIZE)[:, None]
        token = page.to(tl.int64) * UPCAST_PAGE_SIZE + (first % UPCAST_PAGE_SIZE) + tl.arange(0, BLOCK_TOKENS)
        target = token[:, None] * (num_heads * HEAD_DIM) + element[None, :]
        k_at = source * stride_k_page + slot * stride_k_slot + head * stride_k_head + dim
        v_at = source * stride_v_page + slot * stride_v_slot + head * stride_v_head + dim
        loaded = live & stored[:, None]
        k, v = tl.load(k_source + k_at, mask=loaded, other=0.0), tl.load(v_source + v_at, mask=loaded, other=0.0)
        tl.store(upcast_k + target, k.to(upcast_k.dtype.element_ty), mask=live)
        tl.store(upcast_v + target, v.to(upcast_v.dtype.element_ty), mask=live)
