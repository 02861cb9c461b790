"""Factories of a draft model's two attention backends, for SGLang's `DraftBackendFactory`."""

from __future__ import annotations

from typing import Any

from .backend import DraftmarkBackend
from .draft_steps import DraftSteps


def decode_backend(factory: Any) -> DraftSteps:
    """Create the container of the draft steps' backends."""
    return DraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def draft_extend_backend(factory: Any) -> DraftmarkBackend:
    """Create the draft model's own backend, which runs prefill and the draft extend of accepted tokens.

    SGLang captures a CUDA graph of draft extend only for instances of listed classes, such as `TritonAttnBackend`. That
    class is abstract, so `DraftmarkBackend` is registered as a virtual subclass. It inherits no method.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    TritonAttnBackend.register(DraftmarkBackend)
    return DraftmarkBackend(factory.draft_model_runner)
