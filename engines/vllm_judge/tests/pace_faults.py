"""Copies of pace-vllm's backend with a planted fault, as targets of the judge. Imports vLLM and pace-vllm."""

from __future__ import annotations

from typing import Any

from pace_vllm.v1.attention.backends.pace_attn import PaceAttentionBackend, PaceAttentionImpl

from draftmark_vllm_judge.memories.pace import PaceMemory


class ScaledImpl(PaceAttentionImpl):  # type: ignore[misc]
    """Implementation with a fault: its softmax scale is too small."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.scale *= 0.9


class Scaled(PaceAttentionBackend):  # type: ignore[misc]
    """pace-vllm's backend with the fault."""

    judge_memory = f"{__name__}:ScaledMemory"

    @staticmethod
    def get_impl_cls() -> Any:
        """Return the implementation with the fault."""
        return ScaledImpl


class ScaledMemory(PaceMemory):
    """pace-vllm's memory under the backend with the fault."""

    backend = Scaled
