"""Devices, dtypes and attention shapes of the tests of `heuristics`, and the text of a configuration."""

from __future__ import annotations

from dataclasses import replace

from draftmark import AttentionShape, DeviceProfile
from draftmark_cuda_triton.heuristics.common import Kernel, KernelConfig

A100, H200, B200 = (DeviceProfile("cuda", arch, 132) for arch in (80, 90, 100))
SOME = 200
"""Number of requests that is neither small nor large for one KV head on 132 SMs."""
BF16, FP32, E4M3 = ("bfloat16",) * 2, ("float32",) * 2, ("bfloat16", "float8_e4m3fn")


def shape(head_dim: int, dtypes: tuple[str, str] = BF16, page_size: int = 16) -> AttentionShape:
    """Return a shape with one query head for each KV head, so that a query row is one packed row."""
    return AttentionShape(1, 1, head_dim, page_size, *dtypes)


def gathers(config: KernelConfig) -> bool:
    """Return True for the kernels that gather keys."""
    return config.kernel is Kernel.SM90_GATHER


def with_boxes(config: KernelConfig) -> KernelConfig:
    """Return the configuration with TMA boxes instead of gathered keys."""
    return replace(config, kernel=Kernel.SM90) if gathers(config) else config


def described(config: KernelConfig) -> str:
    """Return a configuration as text, such as "64x64 4w 3s 2p 1m 2d".

    Fields: block_m x block_n, warps (w), stages (s), CTAs an SM (p), consumer warp groups (m), fp8 stages (d), KV heads
    a tile (h). The flags "swap_ab" and "gather" follow.
    """
    words = [
        f"{config.block_m}x{config.block_n}",
        f"{config.num_warps}w",
        f"{config.num_stages}s",
        f"{config.ctas_per_sm}p",
    ]
    words += [f"{config.num_consumer_wgs}m"] * bool(config.num_consumer_wgs) + [f"{config.num_fp8_stages}d"] * bool(
        config.num_fp8_stages
    )
    words += [f"{config.kv_heads_per_tile}h"] * (config.kv_heads_per_tile > 1)
    return " ".join([*words, *["swap_ab"] * (config.kernel is Kernel.SM90_FP8), *["gather"] * gathers(config)])
