"""`write_kv`: new K and V rows to their slots, launched again for the next layer."""

from __future__ import annotations

import torch
import triton

from draftmark.runtime import KVCache, record_call

from .heuristics.common import next_power_of_two
from .kernel_variants import kernels, select_variant
from .launch.launcher import launch_kernel, pdl_option, supports_pdl
from .launch.launches import scaled
from .launch.layouts import cached_layout, kv_layout
from .launch.relaunch import RelaunchCache

PER_CALL = ("k", "v", "k_cache", "v_cache", "k_scale", "v_scale", "slot_mapping")
"""The kernel's parameters that another layer or step brings: all of its tensors, in the order of `write_kv`."""
_RELAUNCH = RelaunchCache(PER_CALL)


def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    """Scatter rows to slots, K and V in one launch; see `kv_write.write_kv_rows`.

    Args:
        k, v: ``[rows, KV heads, head_dim]``, head_dim contiguous.
        k_cache, v_cache: ``[pages, P, KV heads, head_dim]``, of the rows' dtype, or e4m3, for which k_scale and v_scale
            (float32 ``[1]``, None for 1) say what a stored value is multiplied by.
        slot_mapping: int64 ``[rows]``.
    """
    tensors = (k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping)
    if not k.is_cuda:
        _launch(*tensors)
        return
    layout = k.shape, k.stride(), v.stride(), kv_layout(k_cache, v_cache, k_scale, v_scale), k.dtype, v.dtype
    _RELAUNCH(layout, tensors, _launch)


def write_kv_layer(k: torch.Tensor, v: torch.Tensor, cache: KVCache, slots: torch.Tensor) -> None:
    """`write_kv` to a layer, for a backend's step; a graph that is recorded on a CPU replays it."""
    tensors = (k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots)
    if not slots.is_cuda:
        record_call(_launch, *tensors, mutates=(cache.k, cache.v))
        return
    _RELAUNCH((k.shape, k.stride(), v.stride(), cached_layout(cache), k.dtype, v.dtype), tensors, _launch)


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    slot_mapping: torch.Tensor,
) -> None:
    # A row is work enough for a program of a GPU; in the interpreter every program costs a millisecond.
    block_rows = 1 if k.is_cuda else 32
    rows, heads, dim = k.shape
    kernel = select_variant(kernels.kv_write.write_kv_rows, k)
    pdl = isinstance(kernel, triton.JITFunction) and supports_pdl()
    launch_kernel(
        kernel, (triton.cdiv(rows, block_rows),),
        k, v, k_cache, v_cache, k_scale, v_scale, slot_mapping, rows, *k.stride()[:2], *v.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], NUM_HEADS=heads, HEAD_DIM=dim, PAGE_SIZE=k_cache.shape[1],
        SCALED=scaled(k_scale, v_scale), QUANTIZE=k_cache.element_size() == 1, BLOCK=next_power_of_two(heads * dim),
        BLOCK_ROWS=block_rows, PDL=pdl, **pdl_option(pdl),
    )  # fmt: skip
