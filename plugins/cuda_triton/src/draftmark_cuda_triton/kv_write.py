"""`write_kv`: scatter new K and V rows to their cache slots. Later layers repeat the recorded launch."""

from __future__ import annotations

import torch
import triton

from draftmark import ceil_div
from draftmark.runtime import KVCache, record_call

from .heuristics.common import next_power_of_two
from .kernel_variants import kernels, select_variant
from .launch.launcher import launch_kernel, pdl_option, supports_pdl
from .launch.layouts import KvFacts, check_dtype, kv_layout
from .launch.operands import scaled
from .launch.relaunch import RelaunchCache

PER_CALL = ("k", "v", "k_cache", "v_cache", "k_scale", "v_scale", "slot_mapping")
"""Kernel parameters that change from layer to layer or step to step: every tensor, in the order of `write_kv`."""


class KvWriter:
    """Scatters K and V rows to their cache slots, and repeats recorded launches for layers of equal layout."""

    def __init__(self) -> None:
        self._relaunch = RelaunchCache(PER_CALL)

    def write(
        self,
        k: torch.Tensor,
        v: torch.Tensor | None,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        k_scale: torch.Tensor | None,
        v_scale: torch.Tensor | None,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Scatter rows to the slots of a cache in one launch; see `write_kv`."""
        check_dtype("slot_mapping", slot_mapping, torch.int64)
        tensors = (k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
        if not k.is_cuda:
            launch_write_kv(*tensors)
            return
        self._relaunch(_layout(k, v, kv_layout(k_cache, v_cache, k_scale, v_scale)), tensors, launch_write_kv)

    def write_layer(
        self, k: torch.Tensor, v: torch.Tensor | None, cache: KVCache, facts: KvFacts, slots: torch.Tensor
    ) -> None:
        """Scatter rows to one layer's cache; on the CPU through `record_call`, for recorded graphs.

        Args:
            v: None for a latent layer, with whole rows in k.
            facts: facts of the cache.
        """
        layout, k_cache, v_cache = facts
        tensors = (k, v, k_cache, v_cache, cache.k_scale, cache.v_scale, slots)
        if not slots.is_cuda:
            record_call(launch_write_kv, *tensors, mutates=(k_cache, v_cache))
            return
        self._relaunch(_layout(k, v, layout), tensors, launch_write_kv)


WRITER = KvWriter()
"""The process's writer, for sibling plugins that call `write_kv`."""


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    """Scatter K and V rows to their cache slots in one launch of `kernels.kv_write.write_kv_rows`.

    Args:
        k, v: ``[rows, KV heads, elements]``, elements contiguous; v is None for latent rows (`launch_write_kv`).
        k_cache, v_cache: ``[pages, P, KV heads, elements]``, in the rows' dtype or e4m3.
        k_scale, v_scale: float32 ``[1]``; real value = stored e4m3 value times scale. None means 1.
        slot_mapping: int64 ``[rows]``; slot = page · P + offset. Rows with slot -1 are not stored.

    Raises:
        BatchError: slot_mapping is not int64.
    """
    WRITER.write(k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)


def _layout(k: torch.Tensor, v: torch.Tensor | None, cache: object) -> tuple[object, ...]:
    """Return all properties of new rows and their cache on which the launch depends, except addresses."""
    own = None if v is None else (v.shape, v.stride(), v.dtype)
    return k.shape, k.stride(), k.dtype, own, cache


def launch_write_kv(
    k: torch.Tensor,
    v: torch.Tensor | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    slot_mapping: torch.Tensor,
    pdl: bool | None = None,
) -> None:
    """Launch `kernels.kv_write.write_kv_rows`; the tensors are those of `write_kv`.

    Args:
        v: None for latent rows ``[rows, 1, head_dim]`` in k. Then k_cache takes the value part of each row and v_cache
            the rest, if the rows have one.
        pdl: launch as a programmatic dependent; None: if the current device supports it.
    """
    # One row is enough work for a GPU program. An interpreted program costs a millisecond, so it takes 32 rows.
    block_rows = 1 if k.is_cuda else 32
    rows, heads, dim = k.shape
    k_dim, first = k_cache.shape[3], 0
    v_dim = dim - k_dim if v is None else v.shape[2]
    if v is None:
        v, first = k, k_dim
    kernel = select_variant(kernels.kv_write.write_kv_rows, k)
    if pdl is None:
        pdl = isinstance(kernel, triton.JITFunction) and supports_pdl()
    launch_kernel(
        kernel, (ceil_div(rows, block_rows),),
        k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, rows, *k.stride()[:2], *v.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], NUM_HEADS=heads, K_DIM=k_dim, V_DIM=v_dim, V_FIRST=first,
        PAGE_SIZE=k_cache.shape[1], SCALED=scaled(k_scale, v_scale), QUANTIZE=k_cache.element_size() == 1,
        BLOCK_K=next_power_of_two(heads * k_dim), BLOCK_V=next_power_of_two(heads * v_dim), BLOCK_ROWS=block_rows,
        PDL=pdl, **pdl_option(pdl),
    )  # fmt: skip
