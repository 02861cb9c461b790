"""vLLM's own CPU backend with one defect at a time, and the item that must find it. Imports vLLM."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)


def backend(impl: type = CPUAttentionBackendImpl, builder: type = CPUAttentionMetadataBuilder) -> Any:
    """vLLM's CPU backend with another impl or builder."""

    class Backend(CPUAttentionBackend):  # type: ignore[misc]
        """See `backend`."""

        @staticmethod
        def get_impl_cls() -> Any:
            """The other impl."""
            return impl

        @staticmethod
        def get_builder_cls() -> Any:
            """The other builder."""
            return builder

    return Backend


class StoresMinusOne(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Slot -1 is stored at slot 0."""

    def do_kv_cache_update(self, layer: Any, key: Any, value: Any, kv_cache: Any, slot_mapping: Any) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping.clamp(min=0))


class WindowOffByOne(CPUAttentionBackendImpl):  # type: ignore[misc]
    """The window is one token short."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        if isinstance(self.sliding_window, int) and self.sliding_window > 1:
            self.sliding_window -= 1


class NoCap(CPUAttentionBackendImpl):  # type: ignore[misc]
    """The soft cap is ignored."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.logits_soft_cap = 0


class NoScale(CPUAttentionBackendImpl):  # type: ignore[misc]
    """The softmax scale is the default's."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.scale = self.head_size**-0.5


class NoValueScale(CPUAttentionBackendImpl):  # type: ignore[misc]
    """The scale of fp8 values is 1 when they are read."""

    def forward(self, layer: Any, *given: Any, **more: Any) -> Any:
        kept, layer._v_scale_float = layer._v_scale_float, 1.0
        try:
            return super().forward(layer, *given, **more)
        finally:
            layer._v_scale_float = kept


class ChangesItsQuery(CPUAttentionBackendImpl):  # type: ignore[misc]
    """The query is changed in place."""

    def forward(self, layer: Any, query: Any, *given: Any, **more: Any) -> Any:
        found = super().forward(layer, query, *given, **more)
        query.mul_(0.5)
        return found


class TakesTheBound(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Lengths are the host's bounds."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        bounds = common_attn_metadata.seq_lens_cpu_upper_bound
        common_attn_metadata.seq_lens = torch.where(common_attn_metadata.seq_lens > 0, bounds, 0)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class KeepsTheTable(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """A request count that was seen before keeps the page table that it had then."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        kept = self.__dict__.setdefault("kept", {})
        table = common_attn_metadata.block_table_tensor
        made = super().build(common_prefix_len, common_attn_metadata, fast_build)
        made.block_table = kept.setdefault(len(table), table.clone())
        return made


class NotCausal(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Rows of a step see each other."""

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
"""By name: the backend, and the item that finds its defect."""
