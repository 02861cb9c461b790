"""Configurations of the Triton kernels in `kernels`, for every GPU (sm_80 and newer)."""

from __future__ import annotations

from draftmark import DTYPE_BYTES, AttentionShape, DeviceProfile

from .common import MIN_BLOCK_M, KernelConfig, next_power_of_two

SMALL_SMEM_ARCHS = frozenset({86, 89, 120, 121})
"""Architectures with 99 KiB of shared memory for a block, where others have 163 or more."""


def generic_config(shape: AttentionShape, device: DeviceProfile, few_rows: bool) -> KernelConfig:
    """A tile of `kernels`, for at most MIN_BLOCK_M packed rows, or for more.

    A tile of keys is 16 KiB, for K and for V, and three are in flight for each of two programs: that fills the
    memory pipe. 16 rows are what `mma` takes at least, 64 what `wgmma` does; more rows than that share a KV tile
    through L2, which beats one larger row tile whose warps wait for each other.
    """
    row_bytes = next_power_of_two(shape.head_dim) * DTYPE_BYTES[shape.q_dtype]
    is_wide = row_bytes > 256 and not few_rows
    return KernelConfig(
        block_m=MIN_BLOCK_M if few_rows else 64,
        block_n=max(16, min(64, 16384 // row_bytes)),
        num_warps=8 if is_wide else 4,
        num_stages=2 if device.arch in SMALL_SMEM_ARCHS else 3,
        ctas_per_sm=1 if is_wide else 2,
    )


def uses_tma(shape: AttentionShape, device: DeviceProfile, config: KernelConfig) -> bool:
    """Whether a tile of keys can come as one box: Hopper and newer, inside one page, nothing to convert or pad."""
    return (
        device.kind == "cuda"
        and device.arch >= 90
        and shape.page_size % config.block_n == 0
        and shape.head_dim in (64, 128, 256)
        and shape.kv_dtype == shape.q_dtype
        and DTYPE_BYTES[shape.q_dtype] == 2
    )
