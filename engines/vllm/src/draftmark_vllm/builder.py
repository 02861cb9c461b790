"""vLLM's builder of attention metadata. vLLM calls it before each eager forward, each capture and each replay."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder

from draftmark_engines import warn_missing_hook

from .limits import engine_limits, layer_shape, limits_of_chunks, serves_trees, verifies_adaptively
from .parts import Part, PartsBuilder, graph_support, refresh_parts

HOOKS = {
    "build_for_cudagraph_capture": "the metadata of full CUDA graphs takes several launches in each step",
    "update_draft_decode_metadata": "the host prepares the metadata of every draft step",
}
"""Methods of vLLM's builder that speed up steps, each with what follows where a release lacks it."""


@dataclass
class StepMetadata:
    """Attention metadata of one step, which every layer of a KV group reads in its forward.

    Not frozen, because vLLM's builder for chunked attention adds attributes.

    Attributes:
        parts: one entry for each run of the step: its first row, its batch, and its backends by the layer's shape.
        seq_lens: int32 ``[R]``, vLLM's own lengths, for a refresh inside a graph.
        causal: False in a block drafter's step. vLLM's DFlash reads it.
        page_table: int32 ``[R, pages]``, vLLM's own, for a refresh inside a graph.
    """

    parts: tuple[Part, ...]
    seq_lens: torch.Tensor
    causal: bool = True
    page_table: torch.Tensor | None = None


class DraftmarkBuilder(PartsBuilder, AttentionMetadataBuilder[StepMetadata]):  # type: ignore[misc]
    """Builds the attention metadata of each step for the layers of one KV group.

    vLLM calls builders and layers one at a time, in the worker's loop. With dual batch overlap two threads alternate
    (``_cpu_yield`` in v1/worker/ubatching.py), each with builders of its own. The thread for asynchronous outputs
    (``async_output_busy_loop`` in v1/executor/multiproc_executor.py) calls neither.
    """

    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        AttentionMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        warn_missing_hooks(AttentionMetadataBuilder)
        self._require_decodes_first()
        # The chunk size is read from the layers, because chunked and full-attention layers can share one KV spec.
        layers = self._layers()
        (chunk,) = {getattr(one, "attention_chunk_size", None) for one in layers}
        limits = engine_limits(vllm_config)
        # vLLM gives a block drafter's layers a configuration of their own, but their builder the target's.
        if any(one.impl.block for one in layers):
            limits = replace(limits, block_size=limits.num_draft_tokens)
        self._open(limits_of_chunks(limits, chunk), chunk, tails=serves_trees(vllm_config))

    def _require_decodes_first(self) -> None:
        """Make runner V1 put decodes before prompts if drafts are trees. After a prompt, a tree runs as a chain."""
        if serves_trees(self.vllm_config):
            self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Return the CUDA graphs that the chosen backend allows; see `graph_support`."""
        model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
        shape = layer_shape(
            model.get_num_attention_heads(parallel),
            model.get_num_kv_heads(parallel),
            model.get_head_size(),
            cache.block_size,
            model.dtype,
            cache.cache_dtype,
        )
        return graph_support(vllm_config, shape, engine_limits(vllm_config))

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int | None:
        """Return the most rows of a request in a full graph of adaptive verification. vLLM calls this since 0.31."""
        return engine_limits(vllm_config).num_draft_tokens if verifies_adaptively(vllm_config) else None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepMetadata:
        """Split a step into runs, build a batch for each run, plan, and write metadata on the device."""
        return self._build(common_attn_metadata, capture=False)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> StepMetadata:
        """Build a step that vLLM captures. It has no host lengths, because its plan must be valid in every replay."""
        return self._build(common_attn_metadata, capture=True)

    def update_draft_decode_metadata(self, metadata: StepMetadata) -> None:
        """Recompute all metadata on the device from vLLM's lengths. vLLM captures this call with its draft steps."""
        refresh_parts(metadata.parts, metadata.seq_lens, metadata.page_table)

    def _build(self, cam: Any, capture: bool) -> StepMetadata:
        if len(self.layer_names) != self._num_layers:
            self._follow_layers()
        step = self._step(cam, capture)
        return StepMetadata(self._parts(step, cam, capture), step.seq_lens, step.causal, step.page_table)


def warn_missing_hooks(base: type) -> None:
    """Log a warning for each of HOOKS that vLLM's base class of builders does not have."""
    for name, effect in HOOKS.items():
        if not hasattr(base, name):
            warn_missing_hook("vLLM", f"{base.__name__}.{name}", effect)
