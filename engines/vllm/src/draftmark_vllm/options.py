"""Options of vLLM that would make steps wrong, or end late in an error, and that not every release asks about."""

from __future__ import annotations

from typing import Any

from .served import OTHER_BACKEND
from .versions import VLLM


def refused_option(config: Any) -> str | None:
    """Name the first option of a `VllmConfig` that is not served, with the way out; None where all are.

    Releases before 0.30 do not ask a backend about R-SWA (a window beside a prompt that all rows see), nor about decode
    context parallelism, whose own check comes behind the weights.
    """
    model, parallel = config.model_config, config.parallel_config
    if getattr(config.cache_config, "kv_sharing_fast_prefill", False):
        return "KV-sharing fast prefill is not served; leave --kv-sharing-fast-prefill out"
    if getattr(model, "enable_sleep_mode", False) and VLLM.installed_before("0.29"):
        return (
            "vLLM before 0.29 does not give back what its backends keep when it wakes; leave --enable-sleep-mode "
            "out, or pip install 'vllm>=0.29'"
        )
    if getattr(model, "rswa_window", None) is not None:
        return f"R-SWA is not served: the model's rows see their prompt beside a window; {OTHER_BACKEND}"
    for name, meant in (("decode_context_parallel_size", "DCP"), ("prefill_context_parallel_size", "PCP")):
        ranks = getattr(parallel, name, 1)
        if ranks > 1:
            return f"{meant} is not served: {name} is {ranks}; leave --{name.replace('_', '-')} out"
    return None
