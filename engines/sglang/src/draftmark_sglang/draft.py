"""The two backends of a draft model, for SGLang's `DraftBackendFactory`."""

from __future__ import annotations

from typing import Any

from .backend import DraftmarkBackend
from .draft_steps import DraftSteps


def decode_backend(factory: Any) -> DraftSteps:
    """The container of the draft steps."""
    return DraftSteps(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)


def draft_extend_backend(factory: Any) -> DraftmarkBackend:
    """What takes over accepted tokens; SGLang makes it the draft runner's own backend, which prefills too.

    SGLang captures a graph of it only for instances of a list of its own classes. Abstract classes take virtual
    subclasses, so ours says that it is one of them; a method is never looked up there.
    """
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    TritonAttnBackend.register(DraftmarkBackend)
    return DraftmarkBackend(factory.draft_model_runner)
