"""Copies of vLLM's CPU backend with one defect each, and the judge item that must find the defect. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)


def backend(impl: type = CPUAttentionBackendImpl, builder: type = CPUAttentionMetadataBuilder) -> Any:
    """Return vLLM's CPU backend with another implementation or builder."""

    class Backend(CPUAttentionBackend):  # type: ignore[misc]
        """vLLM's CPU backend with another implementation and another builder."""

        @staticmethod
        def get_impl_cls() -> Any:
            """Return the replaced implementation."""
            return impl

        @staticmethod
        def get_builder_cls() -> Any:
            """Return the replaced builder."""
            return builder

    return Backend


class StoresMinusOne(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Implementation that stores rows of slot -1 at slot 0."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping.clamp(min=0))


class WindowOffByOne(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Implementation with a sliding window that is one token too short."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        if isinstance(self.sliding_window, int) and self.sliding_window > 1:
            self.sliding_window -= 1


class NoCap(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Implementation that ignores the soft cap."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.logits_soft_cap = 0


class NoScale(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Implementation that uses the default softmax scale instead of the layer's."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.scale = self.head_size**-0.5


class NoValueScale(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Implementation that reads fp8 values with a scale of 1."""

    def forward(self, layer: Any, *given: Any, **more: Any) -> Any:
        kept, layer._v_scale_float = layer._v_scale_float, 1.0
        try:
            return super().forward(layer, *given, **more)
        finally:
            layer._v_scale_float = kept


class ChangesItsQuery(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Implementation that changes the query in place."""

    def forward(self, layer: Any, query: Any, *given: Any, **more: Any) -> Any:
        found = super().forward(layer, query, *given, **more)
        query.mul_(0.5)
        return found


class TakesTheBound(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builder that uses the host's bounds as lengths."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        bounds = common_attn_metadata.seq_lens_cpu_upper_bound
        common_attn_metadata.seq_lens = torch.where(common_attn_metadata.seq_lens > 0, bounds, 0)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class KeepsTheTable(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builder that reuses the first page table that it got for each number of requests."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        kept = self.__dict__.setdefault("kept", {})
        table = common_attn_metadata.block_table_tensor
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        made.block_table = kept.setdefault(len(table), table.clone())
        return made


class NotCausal(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builder that lets every row of a step see all rows of its request."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common_attn_metadata.causal = False
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


DEFECTS = {
    "stores_minus_one": (backend(StoresMinusOne), "engine.forms_are_taken_as_they_are[fp32-decode]"),
    "window_off_by_one": (backend(WindowOffByOne), "numerics.serve_what_is_not_refused[window31]"),
    "no_cap": (backend(NoCap), "numerics.serve_what_is_not_refused[cap0.5]"),
    "no_scale": (backend(NoScale), "numerics.serve_what_is_not_refused[scale1]"),
    "no_value_scale": (backend(NoValueScale), "numerics.serve_what_is_not_refused[kv8]"),
    "changes_its_query": (backend(ChangesItsQuery), "purity.each_call_writes_its_own[extend-fresh]"),
    "takes_the_bound": (backend(builder=TakesTheBound), "lengths.of_any_kind_give_one_result[fp32-decode]"),
    "keeps_the_table": (backend(builder=KeepsTheTable), "random_history.equals_the_oracle[fp32-0]"),
    "not_causal": (backend(builder=NotCausal), "numerics.match_float64[fp32-gqa4-64-verify]"),
}
"""Backend and the item that finds its defect, by the defect's name."""
