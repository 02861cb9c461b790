"""Kernel configurations of the Triton kernels in `kernels`, for every GPU from sm_80."""

from __future__ import annotations

from draftmark import DTYPE_BYTES, AttentionShape, DeviceProfile

from ..switches import uses_generic_kernels
from .common import MIN_BLOCK_M, KernelConfig, next_power_of_two

SMALL_SMEM_ARCHS = frozenset({86, 89, 120, 121})
"""Architectures (sm) with 99 KiB of shared memory for a CTA; the others have at least 163 KiB."""


def generic_config(shape: AttentionShape, device: DeviceProfile, few_rows: bool) -> KernelConfig:
    """Return the configuration of the Triton kernels: 16 packed rows with `few_rows`, else 64.

    A KV tile has at most 16 KiB of K and 16 KiB of V. With up to 256 bytes a head, two CTAs share an SM; with three
    stages each, their loads saturate memory. 16 rows are the M extent of `mma`, 64 that of `wgmma`. A request with more
    rows has several row tiles, and all but the first read the KV tile from L2. That is faster than one larger row tile,
    because its warps would wait for each other.
    """
    row_bytes = next_power_of_two(shape.head_dim) * DTYPE_BYTES[shape.q_dtype]
    needs_8_warps = row_bytes > 256 and not few_rows
    return KernelConfig(
        block_m=MIN_BLOCK_M if few_rows else 64,
        block_n=max(16, min(64, 16384 // row_bytes)),
        num_warps=8 if needs_8_warps else 4,
        num_stages=2 if device.arch in SMALL_SMEM_ARCHS else 3,
        ctas_per_sm=1 if needs_8_warps else 2,
    )


def uses_tma(shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> bool:
    """Check whether TMA can load a KV tile as one box: sm_90 or newer, one page, 16-bit KV, head_dim not padded."""
    return (
        device.kind == "cuda"
        and device.arch >= 90
        and not uses_generic_kernels()
        and shape.page_size % config.block_n == 0
        and shape.head_dim in (64, 128, 256)
        and shape.value_width == shape.head_dim
        and not shape.latent
        and shape.kv_dtype == shape.q_dtype
        and DTYPE_BYTES[shape.q_dtype] == 2
    )
