"""The KV cache that backends read and write, and the compaction of an accepted path."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .errors import BatchError
from .geometry import Geometry

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class KVCache:
    """One layer's pages, owned by the caller.

    Attributes:
        k, v: ``[num_pages, page_size, num_kv_heads, head_dim]`` in kv_dtype, contiguous (NHD).
            Slot s is page s // page_size at offset s % page_size.
        k_scale, v_scale: float32 ``[1]`` on the device: stored value · scale = real value; of fp8 KV alone. Either may
            be None, which means 1, whatever the other one is.

    Raises:
        BatchError: a scale of KV that is not fp8, which kernels take no scale for.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for name, scale, pages in (("k", self.k_scale, self.k), ("v", self.v_scale, self.v)):
            if scale is not None and pages.element_size() != 1:
                raise BatchError(
                    f"{name}_scale is given for a cache of {pages.dtype}, which is read without one; leave it None, or "
                    "store float8_e4m3fn"
                )


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
