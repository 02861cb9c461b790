"""Layers with latent attention (MLA): the form in which SGLang's models call draftmark."""

from __future__ import annotations

from typing import Any

from .facts import NAME


def use_absorbed_form() -> None:
    """Make SGLang's MLA modules run every batch after absorption: query heads read one stored row for each token.

    SGLang chooses the form by the backend's name. For an unknown name it would run prompts before absorption, with keys
    and values that are in no cache (`attention_backend_handler.py`).
    """
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    def absorbed(attention: Any, forward_batch: Any) -> Any:
        return AttnForwardMethod.MLA

    AttentionBackendRegistry.register(NAME, absorbed)
