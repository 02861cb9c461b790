"""Backends as other packages have them, for tests of targets from outside of vLLM. Imports vLLM."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)


class Right(CPUAttentionBackend):  # type: ignore[misc]
    """Backend of another package that is right."""


class ScaledImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Implementation with a fault: its softmax scale is too small."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.scale *= 0.9


class Scaled(CPUAttentionBackend):  # type: ignore[misc]
    """Backend of another package with a planted fault."""

    @staticmethod
    def get_impl_cls() -> Any:
        """Return the implementation with the fault."""
        return ScaledImpl


class OwnBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Builder that only a model runner of its own can call."""

    def build(self, common_attn_metadata: Any, positions: torch.Tensor, batch_pad: int) -> Any:
        """Take arguments that vLLM's runner does not pass."""
        raise AssertionError("not called")


class OwnRunner(CPUAttentionBackend):  # type: ignore[misc]
    """Backend that needs a model runner of its own."""

    @staticmethod
    def get_builder_cls() -> Any:
        """Return the builder."""
        return OwnBuilder


class Sequences:
    """Stands in for the runner of a backend that keeps KV by sequence: a dict of the tokens of each request."""

    pools: ClassVar[dict[str, list[torch.Tensor]]] = {}
    order: ClassVar[list[str]] = []
    sets_back = True

    class backend(CPUAttentionBackend):  # type: ignore[misc]
        """Backend that ignores vLLM's pages."""

        @staticmethod
        def get_impl_cls() -> Any:
            """Return the implementation."""
            return SequenceImpl

        forward_includes_kv_cache_update = True

    def __init__(self, layers: Any, spec: Any, config: Any, num_tokens: int) -> None:
        Sequences.pools, Sequences.order = {}, []

    def update(self, schedule: Any) -> None:
        """Start and end sequences, and cut each to the number of computed tokens."""
        for name in schedule.finished:
            del Sequences.pools[name]
        for name in schedule.new:
            Sequences.pools[name] = []
        Sequences.order = list(schedule.computed)
        for name, length in schedule.computed.items():
            if self.sets_back:
                Sequences.pools[name] = [one[:length] for one in Sequences.pools[name]]


class Appends(Sequences):
    """The same with a fault: rejected rows stay in the sequence."""

    sets_back = False


class SequenceImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """Attention in torch over the tokens of each sequence."""

    def forward(
        self, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, output: Any, **_: Any
    ) -> Any:
        """Append the rows of each request, and attend."""
        starts = metadata.query_start_loc.tolist()
        groups = self.num_heads // self.num_kv_heads
        for number, name in enumerate(Sequences.order):
            first, end = starts[number], starts[number + 1]
            kept = Sequences.pools[name] or [key[:0], value[:0]]
            k, v = (torch.cat([old, new[first:end]]) for old, new in zip(kept, (key, value), strict=True))
            Sequences.pools[name] = [k, v]
            keys, values = (one.float().repeat_interleave(groups, 1) for one in (k, v))
            logits = torch.einsum("rhd,nhd->hrn", query[first:end].float(), keys) * self.scale
            if self.logits_soft_cap:
                logits = self.logits_soft_cap * torch.tanh(logits / self.logits_soft_cap)
            count, total = end - first, len(k)
            back = torch.arange(total - count, total)[:, None] - torch.arange(total)
            hidden = back < 0
            if isinstance(self.sliding_window, tuple) and self.sliding_window[0] >= 0:
                hidden |= back > self.sliding_window[0]
            weights = logits.masked_fill(hidden, float("-inf")).softmax(-1)
            output[first:end] = torch.einsum("hrn,nhd->rhd", weights, values).to(output.dtype)
        return output
