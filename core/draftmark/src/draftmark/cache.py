"""The KV cache that backends read and write, a layer's attention sinks, and the compaction of an accepted path."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import BatchError
from .geometry import Geometry

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class KVCache:
    """One layer's pages and what its attention needs beside them, owned by the caller.

    Attributes:
        k, v: ``[num_pages, page_size, num_kv_heads, head_dim]`` in kv_dtype, contiguous (NHD).
            Slot s is page s // page_size at offset s % page_size.
        k_scale, v_scale: float32 ``[1]`` on the device: stored value · scale = real value; of fp8 KV alone. Either may
            be None, which means 1, whatever the other one is.
        sinks: float32 ``[num_qo_heads]`` on the device, contiguous: of each query head one more logit, in natural
            units, that has no value. Every row's softmax counts it once: exp(sink) joins the denominator. It is
            compared with logits that are scaled and capped already, so neither scale nor cap touches it. -inf counts
            nothing; a row that sees no key is 0 with a sink as without. None where the layer has none
            (`AttentionShape.sinks`). Kernels read it at every run and replay.

    Raises:
        BatchError: a scale of KV that is not fp8, which kernels take no scale for; sinks of another dtype, shape or
            device.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, scale, pages in (("k", self.k_scale, self.k), ("v", self.v_scale, self.v)):
            if scale is not None and pages.element_size() != 1:
                raise BatchError(
                    f"{name}_scale is given for a cache of {pages.dtype}, which is read without one; leave it None, or "
                    "store float8_e4m3fn"
                )
        if self.sinks is not None:
            self._check_sinks(self.sinks)

    def _check_sinks(self, sinks: torch.Tensor) -> None:
        if sinks.dtype is not torch.float32 or sinks.dim() != 1 or not sinks.is_contiguous():
            raise BatchError(
                f"sinks are {str(sinks.dtype).removeprefix('torch.')} {list(sinks.shape)} with strides "
                f"{list(sinks.stride())}, but kernels read contiguous float32 [num_qo_heads]; convert them when the "
                "model is loaded"
            )
        if sinks.device != self.k.device:
            raise BatchError(f"sinks are on {sinks.device}, but the pages are on {self.k.device}; move the sinks there")


def sinks_of(cache: KVCache, geometry: Geometry) -> torch.Tensor | None:
    """Return the sinks with which `attend` must count, or None where the layer has none. No device read.

    A backend asks here and does not look at ``cache.sinks``: sinks that a kernel does not count change every output,
    and nothing else shows it.

    Raises:
        BatchError: `geometry` has sinks and the cache none, or the reverse, or they are not one a query head.
    """
    sinks, a = cache.sinks, geometry.attention
    if sinks is None:
        if a.sinks:
            raise BatchError(
                f"the layer has sinks, but KVCache.sinks is None; give its {a.num_qo_heads} logits, or create the "
                "geometry without sinks"
            )
        return None
    if not a.sinks:
        raise BatchError(
            "KVCache.sinks are given, but the geometry has none; create it with AttentionShape(sinks=True), or leave "
            "them out"
        )
    if sinks.shape[0] != a.num_qo_heads:
        raise BatchError(
            f"KVCache.sinks has {sinks.shape[0]} logits, but the layer has {a.num_qo_heads} query heads; give one a "
            "head of this rank"
        )
    return sinks


class KVPool:
    """The pages of all layers that share one geometry, in two tensors, so that a move touches them in one launch.

    The first `null_pages` pages belong to no request and start as zeros; the rest is not initialised.

    Attributes:
        k, v: ``[num_layers, num_pages, page_size, num_kv_heads, head_dim]``.
        layers: a `KVCache` view per layer.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_layers: int,
        num_pages: int,
        null_pages: int,
        device: torch.device | str,
    ) -> None:
        a = geometry.attention
        shape = (num_layers, num_pages, a.page_size, a.num_kv_heads, a.head_dim)
        dtype = getattr(torch, a.kv_dtype)
        self.k = torch.empty(shape, dtype=dtype, device=device)
        self.v = torch.empty(shape, dtype=dtype, device=device)
        for pool in (self.k, self.v):
            _as_integers(pool)[:, :null_pages] = 0  # an Ascend 910B fills no fp8
        scale = torch.ones(1, dtype=torch.float32, device=device) if a.kv_dtype == "float8_e4m3fn" else None
        self.layers = [KVCache(self.k[i], self.v[i], scale, scale) for i in range(num_layers)]

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy KV from slot source[i] to slot target[i] in every layer. Capturable.

        Everything is read before anything is written, so the two lists may overlap.

        Args:
            source, target: int64 ``[n]`` slots; target slots are distinct but for null pages.
        """
        for pool in (self.k, self.v):
            slots = _as_integers(pool).flatten(1, 2)  # torch indexes no fp8
            slots.index_copy_(1, target, slots.index_select(1, source))


def _as_integers(pool: torch.Tensor) -> torch.Tensor:
    """The same bytes, for what is not done with every floating-point type."""
    return pool.view(_INTEGERS[pool.element_size()])


def slots_of(page_table: torch.Tensor, positions: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the KV slots of positions, by request.

    Args:
        page_table: int32 ``[R, max_pages_per_req]``.
        positions: int64 ``[R, n]``, each below max_pages_per_req · page_size.

    Returns:
        int64 ``[R, n]``; 64-bit because page · page_size may pass 2**31 (vllm#47671).
    """
    pages = page_table.gather(1, positions // page_size).long()
    return pages * page_size + positions % page_size
