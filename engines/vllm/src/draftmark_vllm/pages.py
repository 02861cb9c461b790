"""Views of vLLM's KV memory as draftmark's pages, without copies.

Within a token all K heads come first, then all V heads. So the K rows of all tokens have one pitch, and a TMA load
reads them as one box; V rows do too. For a backend without `Form.STRIDED_KV`, K of all pages comes first, then V of all
pages, so that both are contiguous. vLLM's own backends place K and V of a head side by side. No page is shared between
the two layouts, because a KV group has one backend.
"""

from __future__ import annotations

import torch

from draftmark.runtime import KVCache
from draftmark_engines import EngineError

FP8 = torch.float8_e4m3fn


def head_slots(num_kv_heads: int) -> int:
    """Return the number of head slots per token in a page of vLLM: one per K head, then one per V head."""
    return 2 * num_kv_heads


def has_separate_kv(pages: torch.Tensor, num_kv_heads: int) -> bool:
    """Return whether a layer's pages contain K and V in separate halves, with all heads of a token as one row."""
    return pages.shape[1] != head_slots(num_kv_heads)


def kv_cache(
    pages: torch.Tensor, num_kv_heads: int, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> KVCache:
    """Return views of one layer's pages.

    Args:
        pages: ``[num_pages, 2 · num_kv_heads, page_size, head_dim]``, vLLM's logical shape, stored token by token;
            or ``[num_pages, 2, page_size, num_kv_heads · head_dim]``, stored as K, then V. fp8 may come as uint8.
        k_scale, v_scale: float32, one element each, for fp8 KV; None otherwise.

    Returns:
        Views ``[num_pages, page_size, num_kv_heads, head_dim]`` of the same memory.

    Raises:
        EngineError: the backend takes only contiguous pages, but vLLM leaves gaps between pages, as it does for
            models with Mamba layers.
    """
    scaled = k_scale is not None and v_scale is not None
    typed = pages.view(FP8) if scaled else pages
    if has_separate_kv(pages, num_kv_heads):
        by_head = (*typed[:, 0].shape[:2], num_kv_heads, -1)
        k, v = typed[:, 0].view(by_head), typed[:, 1].view(by_head)
        if not k.is_contiguous():
            raise EngineError(
                f"vLLM places the pages of this model with a stride of {k.stride(0)} elements, but the chosen backend "
                "takes contiguous pages only; choose a backend with STRIDED_KV"
            )
    else:
        by_token = typed.transpose(1, 2)
        k, v = by_token[:, :, :num_kv_heads], by_token[:, :, num_kv_heads:]
    if k_scale is None or v_scale is None:
        return KVCache(k, v)
    return KVCache(k, v, k_scale.view(1), v_scale.view(1))


def stores_in_one_launch(cache: KVCache, key: torch.Tensor) -> bool:
    """Return whether vLLM's own CUDA kernel can store these rows: they lie on a GPU and need no conversion."""
    return key.is_cuda and key.dtype == cache.k.dtype


def store_rows(cache: KVCache, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Store rows of K and V at their slots, without a batch. It does not wait for the device.

    Args:
        key, value: ``[rows, num_kv_heads, head_dim]``.
        slots: int64 ``[rows]``. A row with slot -1 goes to slot 0, in the null page, which no request reads.
    """
    slots = slots.clamp(min=0)
    page, offset = slots // cache.k.shape[1], slots % cache.k.shape[1]
    for pages, rows, scale in ((cache.k, key, cache.k_scale), (cache.v, value, cache.v_scale)):
        if pages.dtype == FP8:
            largest = torch.finfo(FP8).max
            rows = (rows.float() / (1.0 if scale is None else scale)).clamp(-largest, largest)
        # Bytes: not every release of torch can scatter fp8.
        pages.view(_bits(pages)).index_put_((page, offset), rows.to(pages.dtype).view(_bits(pages)))


def _bits(pages: torch.Tensor) -> torch.dtype:
    return torch.uint8 if pages.dtype == FP8 else pages.dtype
