"""vLLM's CPU platform with CUSTOM as a choice. `cpu` returns its path, and vLLM imports it after the selection."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum


class DraftmarkCpuPlatform(CpuPlatform):  # type: ignore[misc]
    """vLLM's CPU platform, changed so that it can select the backend CUSTOM."""

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Return the path of the backend CUSTOM, if it is selected and vLLM's own predicates accept it.

        Raises:
            ValueError: the predicates reject CUSTOM.
        """
        if selected_backend is not AttentionBackendEnum.CUSTOM:
            found: str = super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)
            return found
        backend = selected_backend.get_class()
        reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
        if reasons:
            raise ValueError(f"Selected backend {selected_backend} is not valid for this configuration. {reasons}")
        return ".".join(backend.full_cls_name())

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Apply vLLM's changes to the configuration, but keep the user's page size for MLA models under CUSTOM.

        vLLM's own MLA kernel for CPUs takes pages of 16 only.
        """
        cache = vllm_config.cache_config
        chosen = cache.block_size if getattr(cache, "user_specified_block_size", False) else None
        super().check_and_update_config(vllm_config)
        if chosen is not None and vllm_config.attention_config.backend is AttentionBackendEnum.CUSTOM:
            cache.block_size = chosen
