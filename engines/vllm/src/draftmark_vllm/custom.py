"""Properties that draftmark's backend classes for vLLM share: name, dtypes and page sizes."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import MultipleOf


class CustomBackend:
    """Base of both backend classes: `DraftmarkBackend`, and `DraftmarkMLABackend` for MLA layers.

    Attributes:
        supported_dtypes: query dtypes that the adapter can pass to a backend. `supports_combination` then checks the
            chosen backend.
        supported_kv_cache_dtypes: KV dtypes that pass vLLM's own check. They include fp8 for MLA layers, so that
            `supports_combination` can refuse it in a sentence with a remedy.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        """Return ``"CUSTOM"``, the member of vLLM's backend enum that is reserved for external backends."""
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the supported page sizes in tokens. vLLM passes `kv_cache_spec` since 0.31."""
        return [MultipleOf(16)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Return True for multiples of 16. vLLM's own rule admits more sizes."""
        return block_size is None or block_size % 16 == 0
