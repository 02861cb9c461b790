"""Reads vLLM's configuration: its limits, the device and the chosen backend. Imports no vLLM."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch

from draftmark import AttentionShape, DeviceProfile, LoadedBackend
from draftmark.runtime import device_profile
from draftmark_engines import EngineLimits, choose, window_left

from .settings import Settings

DEFAULT_PAGE_SIZE = 16
"""Page size used where vLLM has not chosen one yet. vLLM then chooses a multiple of this size."""

TREE_WORKERS = "draftmark_vllm.trees."


def engine_limits(config: Any) -> EngineLimits:
    """Read the limits of a `VllmConfig`."""
    scheduler, draft = config.scheduler_config, config.speculative_config
    verify_rows = 1 + (getattr(draft, "num_speculative_tokens", None) or 0)
    captured = config.compilation_config.cudagraph_capture_sizes or ()
    # With K drafts, a drafter's own forwards have up to 1 + K more rows per request than the scheduled rows.
    rows = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * verify_rows
    return EngineLimits(
        max_num_reqs=scheduler.max_num_seqs,
        max_model_len=config.model_config.max_model_len,
        max_num_tokens=max(rows, *captured, 1),
        num_draft_tokens=verify_rows,
        # With drafts, the host has only upper bounds of the lengths in asynchronous steps and in draft steps.
        host_lag=draft is not None,
        branches=Settings.read(config.additional_config).branches if serves_trees(config) else 1,
        block_size=verify_rows if drafts_blocks(config) else 0,
    )


def latent_limits(config: Any) -> EngineLimits:
    """Read the limits of MLA layers from a `VllmConfig`: draftmark runs only requests of at most a verify's rows."""
    limits = engine_limits(config)
    return replace(limits, max_num_tokens=limits.max_num_reqs * limits.num_draft_tokens)


def limits_of_chunks(limits: EngineLimits, chunk: int | None) -> EngineLimits:
    """Return the engine limits for layers with chunked attention, where a row sees only its own chunk (Llama 4).

    For such layers vLLM turns each chunk that a request's rows touch into a request with the pages of that chunk.

    Args:
        chunk: positions in a chunk; None for other layers, which keep their limits.
    """
    if chunk is None:
        return limits
    # Each request can touch two partial chunks (its first and its last). Every position of its other chunks is a row.
    pieces = 2 * limits.max_num_reqs + limits.max_num_tokens // chunk
    return replace(limits, max_num_reqs=pieces, max_model_len=chunk)


def serves_trees(config: Any) -> bool:
    """Return whether drafts are trees, which is so if --worker-cls names a worker of the package `trees`."""
    named = getattr(config.parallel_config, "worker_cls", None)
    return config.speculative_config is not None and str(named).startswith(TREE_WORKERS)


def drafts_blocks(config: Any) -> bool:
    """Return whether a configuration is of a block drafter's layers (DFlash, DSpark): their rows see one another."""
    return bool(getattr(getattr(config, "attention_config", None), "use_non_causal", False))


def verifies_adaptively(config: Any) -> bool:
    """Return whether the device decides how many drafts of each request a step verifies (vLLM 0.28 and later)."""
    return bool(getattr(config.speculative_config, "enable_adaptive_verification", False))


def chosen_backend(config: Any, device: str) -> LoadedBackend:
    """Load the backend that the configuration names, or the device's default.

    Raises:
        EngineError: there is no such backend, or a setting is wrong.
    """
    return _chosen(Settings.read(config.additional_config).backend, device)


@cache
def _chosen(named: Any, device: str) -> LoadedBackend:
    # Each layer asks, and finding the installed backends reads the metadata of all installed packages.
    return choose(named, device)


def profile_of(device: torch.device | str) -> DeviceProfile:
    """Return the device's properties that a backend plans with."""
    return device_profile(device)


def layer_shape(
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    page_size: int | None,
    q_dtype: torch.dtype,
    kv_cache_dtype: str | None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    sinks: bool = False,
) -> AttentionShape:
    """Return one layer's shape from vLLM's arguments for the layer."""
    return AttentionShape(
        num_qo_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_size,
        page_size=page_size if isinstance(page_size, int) and page_size > 0 else DEFAULT_PAGE_SIZE,
        q_dtype=_name(q_dtype),
        kv_dtype=_kv_dtype(q_dtype, kv_cache_dtype),
        softmax_scale=scale,
        window_left=window_left(sliding_window),
        logits_soft_cap=float(logits_soft_cap or 0.0),
        sinks=sinks,
    )


def latent_layer_shape(
    num_heads: int,
    row_dim: int,
    value_dim: int,
    page_size: int | None,
    q_dtype: torch.dtype,
    kv_cache_dtype: str | None,
    scale: float,
) -> AttentionShape:
    """Return the shape of one MLA layer after absorption, from vLLM's arguments for the layer.

    Args:
        row_dim: elements of a stored row: the latent and its rotated rest.
        value_dim: elements of the latent (`kv_lora_rank`).
    """
    usual = layer_shape(num_heads, 1, row_dim, page_size, q_dtype, kv_cache_dtype, scale)
    return replace(usual, value_dim=value_dim, latent=True)


def model_latent_shape(
    config: Any, row_dim: int, page_size: int | None, q_dtype: torch.dtype, kv_cache_dtype: str | None
) -> AttentionShape:
    """Return the shape of a model's MLA layers, before they exist. Its scale is 1, for which no backend refuses it."""
    model = config.model_config
    heads = model.get_num_attention_heads(config.parallel_config)
    value_dim = min(getattr(model.hf_text_config, "kv_lora_rank", row_dim), row_dim)
    return latent_layer_shape(heads, row_dim, value_dim, page_size, q_dtype, kv_cache_dtype, scale=1.0)


def is_fp8(kv_cache_dtype: str | None) -> bool:
    """Return whether KV is stored as fp8, by vLLM's name of the dtype."""
    return kv_cache_dtype in ("fp8", "fp8_e4m3")


def _kv_dtype(q_dtype: torch.dtype, kv_cache_dtype: str | None) -> str:
    if is_fp8(kv_cache_dtype):
        return "float8_e4m3fn"
    return _name(q_dtype) if kv_cache_dtype in (None, "auto") else str(kv_cache_dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
