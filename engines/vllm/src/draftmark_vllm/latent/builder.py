"""vLLM's builder of attention metadata for MLA layers. vLLM's own base class prepares prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport

from ..limits import latent_limits, model_latent_shape, serves_trees
from ..parts import Part, PartsBuilder, graph_support, refresh_parts, step_of
from ..step import part


@dataclass
class LatentDecode(MLACommonDecodeMetadata):  # type: ignore[misc]
    """Metadata of a step's decodes and verifies, which come before its prompts.

    Attributes:
        parts: one entry for each run: its first row, its batch, and its backends by the layer's shape.
    """

    parts: tuple[Part, ...] = ()


class DraftmarkMLABuilder(PartsBuilder, MLACommonMetadataBuilder[MLACommonMetadata]):  # type: ignore[misc]
    """Builds the attention metadata of each step for the MLA layers of one KV group.

    Requests with no more rows than a verify are decodes, short prompts included; draftmark runs them. vLLM's runner
    puts them first, and vLLM's own classes run all other requests.
    """

    query_len_support: ClassVar[Any] = QueryLenSupport.VARLEN
    _cudagraph_support: ClassVar[Any] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        MLACommonMetadataBuilder.__init__(self, kv_cache_spec, layer_names, vllm_config, device)
        self.layer_names = layer_names
        limits = latent_limits(vllm_config)
        self.reorder_batch_threshold = limits.num_draft_tokens
        self._open(limits, None, tails=serves_trees(vllm_config))
        self._cam: Any = None
        self._capture = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Return the CUDA graphs that the chosen backend allows; see `graph_support`."""
        model, cache = vllm_config.model_config, vllm_config.cache_config
        shape = model_latent_shape(vllm_config, model.get_head_size(), cache.block_size, model.dtype, cache.cache_dtype)
        return graph_support(vllm_config, shape, latent_limits(vllm_config))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Split a step into decodes and prompts, and build the metadata of both."""
        if len(self.layer_names) != self._num_layers:
            self._follow_layers()
        self._cam = common_attn_metadata
        try:
            return super().build(common_prefix_len, common_attn_metadata, fast_build)
        finally:
            self._cam = None

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Build a step that vLLM captures. It has no host lengths, because its plan must be valid in every replay."""
        self._capture = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._capture = False

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Recompute all metadata on the device from vLLM's lengths. vLLM captures this call with its draft steps."""
        decode = metadata.decode
        refresh_parts(decode.parts, decode.seq_lens, decode.block_table)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        *rest: Any,
        dcp_tot_seq_lens_device: torch.Tensor | None = None,
        **more: Any,
    ) -> LatentDecode:
        """Build the batches of the first requests of a step. Arguments are vLLM's; their names and number vary."""
        reqs, cam = len(seq_lens_device), self._cam
        whole = step_of(cam, self._capture or not self._host_lengths, self._exact)
        bounds = whole.seq_bounds
        step = replace(
            whole,
            query_start=query_start_loc_device,
            query_start_host=tuple(query_start_loc_cpu.tolist()),
            seq_lens=seq_lens_device,
            page_table=block_table_tensor,
            slots=part(whole.slots, 0, num_decode_tokens),
            num_rows=num_decode_tokens,
            seq_bounds=None if bounds is None else bounds[:reqs],
        )
        return LatentDecode(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            parts=self._parts(step, cam, self._capture),
        )
