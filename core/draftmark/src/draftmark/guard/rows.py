"""Checks of a layer's cache: the rows of a latent layer, and all caches against a geometry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..batch.checks import shown
from ..errors import BatchError
from ..geometry import AttentionShape, Form, Geometry

if TYPE_CHECKING:
    from ..cache import KVCache

ROWS = "[num_pages, page_size, head_dim]"


def is_leading(v: torch.Tensor, k: torch.Tensor) -> bool:
    """Return True if `v` is a view of the first elements of each row of `k`."""
    same_rows = v.shape[:-1] == k.shape[:-1] and v.stride() == k.stride() and v.dtype == k.dtype
    return same_rows and v.shape[-1] <= k.shape[-1] and v.data_ptr() == k.data_ptr()


def check_rows(rows: object, value_dim: object) -> None:
    """Check the one buffer of `KVCache.latent`.

    Raises:
        BatchError: the first argument that does not fit.
    """
    if not isinstance(rows, torch.Tensor) or rows.dim() != 3:
        remedy = "pass one such tensor, or a tuple of two"
        raise BatchError(f"rows are {shown(rows)}, but a latent cache has rows {ROWS}; {remedy}")
    if type(value_dim) is not int or not 1 <= value_dim <= rows.shape[-1]:
        raise BatchError(
            f"value_dim is {value_dim!r}, but the value is the first 1 … {rows.shape[-1]} elements of a row; pass "
            "AttentionShape.value_width"
        )


def check_parts(parts: tuple[object, ...], value_dim: object) -> None:
    """Check the two buffers of `KVCache.latent`.

    Raises:
        BatchError: the first argument that does not fit.
    """
    tensors = [part for part in parts if isinstance(part, torch.Tensor) and part.dim() == 3]
    alike = {(part.dtype, part.device, part.shape[:-1]) for part in tensors}
    if len(parts) != 2 or len(tensors) != 2 or len(alike) != 1 or not all(part.shape[-1] for part in tensors):
        raise BatchError(
            f"rows are ({', '.join(map(shown, parts))}), but two buffers are value parts [num_pages, page_size, "
            "value_dim] and rests [num_pages, page_size, head_dim - value_dim] of one dtype and device; allocate both "
            "with the same pages"
        )
    width = tensors[0].shape[-1]
    if value_dim is not None and value_dim != width:
        raise BatchError(
            f"value_dim is {value_dim!r}, but the value parts have {width} elements; leave it out for two buffers"
        )


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
        return [("cache.k", cache.k, (*heads, a.head_dim)), ("cache.v", cache.v, (*heads, a.value_width))]
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
