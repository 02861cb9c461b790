"""Check for vLLM options that draftmark cannot serve and that some vLLM releases do not reject before loading."""

from __future__ import annotations

from typing import Any

from .bound_backends import OTHER_BACKEND, Geometries
from .limits import serves_trees, verifies_adaptively
from .versions import VLLM


def refused_option(config: Any) -> str | None:
    """Return a sentence about the first unsupported option of a `VllmConfig`, with its remedy; None if there is none.

    Before 0.30, two options need this check. R-SWA adds the whole prompt to each row's window. Decode context
    parallelism is checked by vLLM only after it has loaded the weights.
    """
    model, parallel = config.model_config, config.parallel_config
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "KV-sharing fast prefill is not served; leave --kv-sharing-fast-prefill out"
    if getattr(model, "enable_sleep_mode", False) and VLLM.installed_before("0.29"):
        return (
            "vLLM before 0.29 does not restore its backends' memory when it wakes from sleep; leave "
            "--enable-sleep-mode out, or pip install 'vllm>=0.29'"
        )
    if getattr(model, "rswa_window", None) is not None:
        return f"R-SWA is not served: a row of the model sees the prompt and a window; {OTHER_BACKEND}"
    for name, meant in (("decode_context_parallel_size", "DCP"), ("prefill_context_parallel_size", "PCP")):
        ranks = getattr(parallel, name, 1)
        if ranks > 1:
            return f"{meant} is not served: {name} is {ranks}; leave --{name.replace('_', '-')} out"
    return None


def refused_ragged(config: Any, geometries: Geometries, backend: str) -> str | None:
    """Return a sentence if drafts are trees, or verified adaptively, without RAGGED_VERIFY; None otherwise."""
    if geometries.ragged:
        return None
    if serves_trees(config):
        return f"backend {backend} has no RAGGED_VERIFY, which trees need; leave --worker-cls out"
    if verifies_adaptively(config):
        return f"backend {backend} has no RAGGED_VERIFY; leave enable_adaptive_verification out"
    return None
