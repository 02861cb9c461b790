"""Implementation of one MLA layer for vLLM: the absorbed attention of decodes and verifies."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.mla_attention import MLACommonImpl
from vllm.platforms import current_platform

from draftmark import AttentionShape
from draftmark.runtime import KVCache
from draftmark_engines import EngineError
from draftmark_engines.early import EARLY_KERNELS

from ..bound_backends import OTHER_BACKEND, Geometries, arena_bytes
from ..limits import chosen_backend, latent_layer_shape, latent_limits, profile_of
from ..reservation import RESERVATION
from ..step import part


class DraftmarkMLAImpl(MLACommonImpl):  # type: ignore[misc]
    """Runs the decodes and verifies of one MLA layer. vLLM stores rows, runs prompts, and projects queries and outputs.

    Raises:
        EngineError: the layer has a property that no backend serves.
    """

    can_return_lse_for_decode: ClassVar[bool] = False
    supports_dcp: ClassVar[bool] = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        *rest: Any,
        **mla: Any,
    ) -> None:
        given = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
        for name, value in given.items():
            if value:
                raise EngineError(f"an MLA layer has {name}, which is not served; {OTHER_BACKEND}")
        super().__init__(num_heads, head_size, scale, num_kv_heads, None, None, kv_cache_dtype, None, *rest, **mla)
        self.supports_quant_query_input = False  # queries keep the model's dtype
        self._rows: torch.Tensor | None = None
        self._cache: KVCache | None = None
        self._shape: AttentionShape | None = None
        self._reserve(get_current_vllm_config())

    def shape(self, page_size: int, dtype: torch.dtype) -> AttentionShape:
        """Return the layer's shape, and keep it. The builder calls this after vLLM has chosen a page size."""
        self._shape = self._described(page_size, dtype)
        return self._shape

    def _described(self, page_size: int | None, dtype: torch.dtype) -> AttentionShape:
        return latent_layer_shape(
            self.num_heads, self.head_size, self.kv_lora_rank, page_size, dtype, self.kv_cache_dtype, self.scale
        )

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, None]:
        """Compute absorbed attention of a step's decodes and verifies.

        Args:
            q: ``[rows, heads, row width]``, or its latent part and its rotated rest.
            kv_c_and_k_pe_cache: ``[pages, page_size, row width]``, vLLM's own memory. It has the rows of this step.
            attn_metadata: result of `DraftmarkMLABuilder.build`.

        Returns:
            ``[rows, heads, kv_lora_rank]``, and no log-sum-exp.
        """
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        shape = self._shape
        assert shape is not None, "a builder reads the shape of each of its layers first"
        cache, done = self._view(kv_c_and_k_pe_cache), 0
        out = query.new_empty(*query.shape[:2], self.kv_lora_rank)
        for first, batch, backends in attn_metadata.decode.parts:
            rows = batch.num_rows
            backends[shape].attend(part(query, first, rows), cache, batch, part(out, first, rows))
            done = first + rows
        if done < len(out):
            out[done:].zero_()  # rows after the last request: vLLM projects them too
        return out, None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *skip_scale: bool,
    ) -> None:
        """Store the rows of a step. vLLM's own kernel does it, except on a CPU, for which vLLM has none.

        vLLM 0.33 and later give `skip_scale`.
        """
        if kv_cache.device.type != "cpu":
            super().do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, *skip_scale)
        elif kv_cache.numel():
            slots = slot_mapping.flatten()
            stored = slots >= 0
            rows = torch.cat((kv_c_normed, k_pe.flatten(1)), dim=-1)[: len(slots)][stored].to(kv_cache.dtype)
            slots = slots[stored].long()
            size = kv_cache.shape[1]
            kv_cache[slots // size, slots % size] = rows

    def _view(self, rows: torch.Tensor) -> KVCache:
        if self._cache is None or self._rows is not rows:
            self._rows, self._cache = rows, KVCache.latent(rows, value_dim=self.kv_lora_rank)
        return self._cache

    def _reserve(self, config: Any) -> None:
        """Check that the backend serves the layer, and reserve the bytes that it will allocate.

        vLLM's measurement of memory does not call this class, so the bytes are reserved before it.
        """
        device, dtype = current_platform.device_type, torch.get_default_dtype()
        backend = chosen_backend(config, device)
        shape = self._described(config.cache_config.block_size, dtype)
        made = Geometries.of(backend, shape, latent_limits(config), profile_of(device))
        EARLY_KERNELS.begin(backend, made.each(), device)
        if device != "cpu":
            RESERVATION.hold(shape, arena_bytes(backend, made), torch.device(device))
