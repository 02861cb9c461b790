"""Checks of a layer's cache against the geometry."""

from __future__ import annotations

import torch

from draftmark.batch.checks import shown
from draftmark.cache import KVCache
from draftmark.cache_checks import is_leading
from draftmark.errors import BatchError
from draftmark.geometry import PLAIN_ROWS, AttentionShape, Form, Geometry


def check_cache(cache: KVCache, geometry: Geometry, device: torch.device, largest_page: int) -> None:
    """Check the tensors of a layer's cache against the geometry, and against the largest page that a batch names.

    Raises:
        BatchError: the first tensor that does not fit.
    """
    a, wanted = geometry.attention, _wanted(cache, geometry)
    for name, pages, want in wanted:
        if pages.dim() != len(want) + 1 or pages.shape[1:] != want or pages.dtype != getattr(torch, a.kv_dtype):
            raise BatchError(
                f"{name} is {shown(pages)}, but the geometry needs {a.kv_dtype} [num_pages, "
                f"{', '.join(map(str, want))}]; create the KVPool with this geometry"
            )
        if pages.device != device:
            raise BatchError(f"{name} is on {pages.device}, but the batch is on {device}; use one device")
        if largest_page >= pages.shape[0]:
            raise BatchError(
                f"page_table has page {largest_page}, but {name} has {pages.shape[0]} pages; create the KVPool with "
                "more pages, or hand out pages of this pool"
            )
    if a.latent:
        _check_latent(cache, geometry)
    elif Form.ENGINE_STORES not in geometry.forms and cache.k.numel() and is_leading(cache.v, cache.k):
        raise BatchError(
            "cache.v is a view of cache.k, but the layer is not latent, so its values would overwrite keys; give V its "
            "own memory, or set AttentionShape.latent"
        )
    for name, pages, _ in wanted:
        _check_strides(name, pages, geometry)


def _wanted(cache: KVCache, geometry: Geometry) -> list[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Return name, tensor and expected page shape of each tensor of a cache."""
    a = geometry.attention
    if Form.LATENT_PARTS not in geometry.forms:
        try:
            cache.k  # noqa: B018
        except BatchError as error:
            raise BatchError(
                "the cache has rows in two buffers, but the geometry lacks Form.LATENT_PARTS; add the form, or pass "
                "one buffer to KVCache.latent"
            ) from error
        heads = a.page_size, a.num_kv_heads
        return [("cache.k", cache.k, (*heads, a.row_width)), ("cache.v", cache.v, (*heads, a.value_width))]
    values, rest = cache.parts
    widths = a.value_width, a.head_dim - a.value_width
    return [
        ("cache.parts[0]", values, (a.page_size, widths[0])),
        ("cache.parts[1]", rest, (a.page_size, widths[1])),
    ]


def _check_strides(name: str, pages: torch.Tensor, geometry: Geometry) -> None:
    """Require contiguous pages, or with `Form.STRIDED_KV` contiguous heads. V of a latent layer is a view of K."""
    a, strides = geometry.attention, list(pages.stride())
    if Form.STRIDED_KV in geometry.forms:
        if strides[-1] != 1 and pages.shape[-1] > 1:
            raise BatchError(f"{name} has strides {strides}, but the elements of a head are contiguous; copy the pages")
    elif not pages.is_contiguous() and not (a.latent and name == "cache.v"):
        raise BatchError(
            f"{name} has strides {strides}, but pages are contiguous without Form.STRIDED_KV; give the tensor its own "
            "memory, or add the form"
        )


def _check_latent(cache: KVCache, geometry: Geometry) -> None:
    a: AttentionShape = geometry.attention
    if Form.LATENT_PARTS not in geometry.forms and not is_leading(cache.v, cache.k):
        raise BatchError(
            f"cache.v has its own memory, but a latent layer stores one row per token, and the value is the first "
            f"{a.value_width} elements of the row; create the cache with KVCache.latent"
        )
    if cache.k_scale is not cache.v_scale:
        raise BatchError("k_scale and v_scale differ, but a latent row has one scale; pass it to KVCache.latent")
    if a.row_format != PLAIN_ROWS and cache.k_scale is not None:
        raise BatchError(
            f"the cache has a scale, but rows of row_format {a.row_format} have their own; pass scale=None to "
            "KVCache.latent"
        )
