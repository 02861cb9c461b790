"""vLLM classes and functions that the judge uses. Each is imported from the module that has it in this release."""

from __future__ import annotations

import importlib
from typing import Any


def first_of(*places: str) -> Any:
    """Return the first object in a list of ``"module:name"`` that can be imported.

    Raises:
        ImportError: no object in the list can be imported.
    """
    errors = []
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            errors.append(f"{place}: {error}")
    raise ImportError("; ".join(errors))


CommonAttentionMetadata = first_of(
    "vllm.v1.attention.backend:CommonAttentionMetadata", "vllm.v1.attention.backends.utils:CommonAttentionMetadata"
)
AttentionCGSupport = first_of(
    "vllm.v1.attention.backend:AttentionCGSupport", "vllm.v1.attention.backends.utils:AttentionCGSupport"
)
Attention = first_of(
    "vllm.model_executor.layers.attention:Attention", "vllm.attention.layer:Attention", "vllm.attention:Attention"
)
BackendEnum = first_of(
    "vllm.v1.attention.backends.registry:AttentionBackendEnum",
    "vllm.attention.backends.registry:AttentionBackendEnum",
)
