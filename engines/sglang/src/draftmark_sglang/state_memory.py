"""Memory of recurrent states in SGLang: slots without a copy of the state for each draft token.

SGLang's pool holds `num_draft_tokens` states and windows for each running request. draftmark's backend takes rejected
rows back from its own records, so SGLang gives that memory to more slots and KV.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftmark import DraftShape, Limits, Mode, StateGeometry
from draftmark.runtime import device_profile

from .facts import drafts_of
from .state_shapes import ServedStates, served_states

GIB = 1 << 30


def active_states() -> ServedStates | None:
    """Return the recurrent layers of this process's target that draftmark runs."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.runtime_context import get_server_args

    arguments = get_server_args()
    return served_states(_target_config(arguments), resolved_view(arguments))


def _target_config(arguments: Any) -> Any:
    """Return SGLang's configuration of the target. From 0.5.19 on the arguments no longer keep it."""
    from sglang.srt.configs.model_config import ModelConfig

    kept = getattr(arguments, "get_model_config", None)
    return ModelConfig.from_server_args(arguments) if kept is None else kept()


def size_without_snapshots(original: Callable[[Any, float], float], configurator: Any, rest_gib: float) -> float:
    """Compute the number of slots with SGLang's formula for decoding without drafts.

    Args:
        configurator: SGLang's `KVCacheConfigurator`.
        rest_gib: memory for slots and KV, in GiB.

    Returns:
        Memory for KV, in GiB.
    """
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    arguments, algorithm = resolved_view(configurator.server_args), configurator.spec_algorithm
    served = served_states(configurator.model_config, arguments)
    if served is None or algorithm.is_none():
        return original(configurator, rest_gib)
    configurator.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        return original(configurator, rest_gib - records_gib(served, configurator, arguments, rest_gib))
    finally:
        configurator.spec_algorithm = algorithm


def records_gib(served: ServedStates, configurator: Any, arguments: Any, rest_gib: float) -> float:
    """Return the GiB of the backend's buffers for the requests that will fit.

    The buffers grow with the requests, and SGLang limits the requests by the slots, which have
    ``ratio / (1 + ratio)`` of the memory (`mamba_full_memory_ratio`).
    """
    params = configurator.mambaish_config.mamba2_cache_params
    per_request = _bytes(served, configurator, arguments, len(params.layers), 2) - _bytes(
        served, configurator, arguments, len(params.layers), 1
    )
    slots = configurator._calculate_mamba_ratio()
    ratio, requests = _memory_ratio(arguments), arguments.max_running_requests
    if arguments.disable_radix_cache and requests is not None:
        fit = requests
    elif arguments.max_mamba_cache_size is not None:
        fit = arguments.max_mamba_cache_size // slots
    else:
        budget = rest_gib * GIB * ratio / (1 + ratio)
        fit = int(budget / (params.mamba_cache_per_req * slots + per_request))
    requests = max(1, fit if requests is None else min(requests, fit))
    return _bytes(served, configurator, arguments, len(params.layers), requests) / GIB


def _memory_ratio(arguments: Any) -> float:
    """Return `mamba_full_memory_ratio`. In SGLang 0.5.23 the arguments have None for the default."""
    found = arguments.mamba_full_memory_ratio
    if found is None:
        from sglang.srt.runtime_context import get_schedule

        found = get_schedule().mamba_full_memory_ratio
    return float(found)


def _bytes(served: ServedStates, configurator: Any, arguments: Any, layers: int, requests: int) -> int:
    """Return the bytes of the buffers for this number of requests."""
    limits = Limits(requests, configurator.model_config.context_len, overshoot=True, host_lag=False)
    topk, steps, nodes = drafts_of(arguments)
    modes = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
    device = device_profile(configurator.device)
    geometry = StateGeometry.create(served.shape, limits, DraftShape(topk, steps, nodes), device, modes, layers)
    return sum(spec.nbytes for spec in served.loaded.state_buffers(geometry))
