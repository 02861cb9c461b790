"""Runs vLLM's capability predicates on a geometry. The judge counts a refused geometry as not served."""

from __future__ import annotations

from typing import Any

from draftmark import Geometry

from .config import FP8, dtype_of, takes


def reasons_against(backend: Any, geometry: Geometry) -> list[str]:
    """Return the reasons why vLLM's selector would refuse the backend for this layer."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    a = geometry.attention
    arguments = {
        "head_size": a.head_dim,
        "dtype": dtype_of(a.q_dtype),
        "kv_cache_dtype": "fp8" if a.kv_dtype == FP8 else "auto",
        "block_size": a.page_size,
        "use_mla": a.latent,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": current_platform.get_device_capability() or DeviceCapability(9, 0),
        "attn_type": "decoder",
        "has_sliding_window": a.window_left >= 0,
    }
    found: list[str] = [
        str(reason) for reason in backend.validate_configuration(**takes(backend.validate_configuration, arguments))
    ]
    if (sizes := _sizes(backend)) and not any(a.page_size % size == 0 for size in sizes):
        found.append(f"pages of {a.page_size} tokens are not a multiple of {' or '.join(map(str, sizes))}")
    return found


def page_step(backend: Any) -> int:
    """Return the backend's smallest page size in tokens. Every other supported page size is a multiple."""
    return min(_sizes(backend), default=16)


def _sizes(backend: Any) -> list[int]:
    get_sizes = getattr(backend, "get_supported_kernel_block_sizes", None) or getattr(
        backend, "get_supported_kernel_block_size", None
    )
    sizes = get_sizes() if callable(get_sizes) else getattr(backend, "supported_kernel_block_sizes", [])
    return [getattr(one, "base", one) for one in sizes]
