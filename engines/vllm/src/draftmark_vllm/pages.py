"""vLLM's KV memory as draftmark's pages: views, no copies.

Of a token all K heads lie together, then all V heads: so K of all tokens are rows of one pitch, which a copy engine
reads as one box, and V likewise. For a backend that takes no views of packed pages (`Form.STRIDED_KV`) K of all pages
lie in front of V of all pages, so that both are contiguous. vLLM's own backends keep K and V of a head side by side
instead; they share no page with ours, since a KV group has one backend.
"""

from __future__ import annotations

import torch

from draftmark.runtime import KVCache
from draftmark_engines import EngineError

FP8 = torch.float8_e4m3fn


def head_slots(num_kv_heads: int) -> int:
    """Heads of vLLM's logical page: those of K, then those of V."""
    return 2 * num_kv_heads


def is_apart(pages: torch.Tensor, num_kv_heads: int) -> bool:
    """Whether a layer's pages hold K apart from V, each with all heads as one row of a token."""
    return pages.shape[1] != head_slots(num_kv_heads)


def kv_cache(
    pages: torch.Tensor, num_kv_heads: int, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> KVCache:
    """View one layer's pages.

    Args:
        pages: ``[num_pages, 2 · num_kv_heads, page_size, head_dim]``, vLLM's logical shape, in memory token by token;
            or ``[num_pages, 2, page_size, num_kv_heads · head_dim]``, in memory K and then V. fp8 may come as uint8.
        k_scale, v_scale: float32 of one element, of fp8 KV; None otherwise.

    Returns:
        Views ``[num_pages, page_size, num_kv_heads, head_dim]`` of the same memory.

    Raises:
        EngineError: the pages lie apart, as beside the states of Mamba layers, but the backend takes no views.
    """
    scaled = k_scale is not None and v_scale is not None
    typed = pages.view(FP8) if scaled else pages
    if is_apart(pages, num_kv_heads):
        by_head = (*typed[:, 0].shape[:2], num_kv_heads, -1)
        k, v = typed[:, 0].view(by_head), typed[:, 1].view(by_head)
        if not k.is_contiguous():
            raise EngineError(
                f"vLLM lays the pages of this model apart, {k.stride(0)} elements from page to page, and the backend "
                "that serves takes whole ones alone; choose one that has STRIDED_KV"
            )
    else:
        by_token = typed.transpose(1, 2)
        k, v = by_token[:, :, :num_kv_heads], by_token[:, :, num_kv_heads:]
    if k_scale is None or v_scale is None:
        return KVCache(k, v)
    return KVCache(k, v, k_scale.view(1), v_scale.view(1))
