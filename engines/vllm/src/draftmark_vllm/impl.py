"""Implementation of one attention layer for vLLM: it writes K and V to the pages, then computes attention."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from draftmark import AttentionShape, LoadedBackend
from draftmark.runtime import KVCache
from draftmark_engines import EngineError
from draftmark_engines.early import EARLY_KERNELS

from .bound_backends import OTHER_BACKEND, Geometries, arena_bytes
from .limits import chosen_backend, drafts_blocks, engine_limits, is_fp8, layer_shape, profile_of
from .pages import kv_cache as view_pages
from .pages import store_rows, stores_in_one_launch
from .reservation import RESERVATION
from .step import part

if TYPE_CHECKING:
    from .builder import StepMetadata


class DraftmarkImpl(AttentionImpl):  # type: ignore[misc]
    """Runs one attention layer of a model. vLLM creates it before it loads weights.

    Attributes:
        block: whether the layer belongs to a block drafter. Its rows see one another.

    Raises:
        EngineError: the layer has a property that no backend serves.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
        **extra: Any,
    ) -> None:
        _refuse(alibi_slopes, attn_type, extra)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window, self.logits_soft_cap = sliding_window, logits_soft_cap
        self._loaded_sinks = sinks
        self._sinks: torch.Tensor | None = None
        self._config = get_current_vllm_config()
        self.block = drafts_blocks(self._config)
        self._pages: torch.Tensor | None = None
        self._cache: KVCache | None = None
        self._shape: AttentionShape | None = None
        self._reserved = False
        device = current_platform.device_type
        backend, _, made = self._geometries(torch.get_default_dtype(), device)
        EARLY_KERNELS.begin(backend, made.each(), device)

    def shape(self, page_size: int, dtype: torch.dtype) -> AttentionShape:
        """Return the layer's shape, and keep it. The builder calls this after vLLM has chosen a page size."""
        self._shape = self._described(page_size, dtype)
        return self._shape

    def _described(self, page_size: int | None, dtype: torch.dtype) -> AttentionShape:
        return layer_shape(
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            page_size,
            dtype,
            self.kv_cache_dtype,
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
            sinks=self._loaded_sinks is not None,
        )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Copy the layer's sinks to a float32 tensor.

        The tensor keeps its address when vLLM loads weights again, because captured graphs read it.
        """
        if self._loaded_sinks is None:
            return
        if self._sinks is None:
            self._sinks = torch.empty_like(self._loaded_sinks, dtype=torch.float32, requires_grad=False)
        self._sinks.copy_(self._loaded_sinks.detach())

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: StepMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute attention of all rows of a step into `output`, and return it.

        Args:
            query, output: ``[rows, heads, head_dim]``. key, value: ``[rows, KV heads, head_dim]``. All may have more
                rows than the step: vLLM pads them to a captured size.
            kv_cache: pages of the layer, in vLLM's own memory.
            attn_metadata: result of `DraftmarkBuilder.build`; None while vLLM measures memory.
        """
        if attn_metadata is None:
            self._reserve(query)
            return output.fill_(0)
        cache, shape = self._view(layer, kv_cache), self._shape
        assert shape is not None and shape.softmax_scale, "a builder reads the shape of each of its layers first"
        # Up to vLLM 0.29 `--model-impl transformers` sets self.scale in the forward call, after the builder has passed
        # the old scale to the backend. Scaling the query has the same effect.
        if self.scale != shape.softmax_scale:
            query = query * (self.scale / shape.softmax_scale)
        # vLLM links layers of Gemma 4's assistant to other layers' KV after it creates them, so the constructor's
        # argument does not show the link. Up to vLLM 0.30 the keys of these layers are uninitialized memory.
        if layer.kv_sharing_target_layer_name is None:
            # Write K and V of all runs before any attention: a request can read a page that another request fills in
            # this step.
            for first, batch, backends in attn_metadata.parts:
                rows = batch.num_rows
                backends[shape].write_kv(part(key, first, rows), part(value, first, rows), cache, batch)
        for first, batch, backends in attn_metadata.parts:
            rows = batch.num_rows
            backends[shape].attend(part(query, first, rows), cache, batch, part(output, first, rows))
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Store K and V outside a forward: DFlash stores the target's features as context of its drafts.

        Args:
            key, value: ``[rows, KV heads, head_dim]``. slot_mapping: int64 ``[rows]``, -1 for rows that store nothing.
        """
        cache = self._view(layer, kv_cache)
        if stores_in_one_launch(cache, key):
            from vllm._custom_ops import reshape_and_cache_flash

            scales = layer._k_scale, layer._v_scale  # not read: dtype "auto" stores K and V as they are
            reshape_and_cache_flash(key, value, cache.k, cache.v, slot_mapping, "auto", *scales)
        else:
            store_rows(cache, key, value, slot_mapping)

    def _view(self, layer: Any, pages: torch.Tensor) -> KVCache:
        if self._cache is None or self._pages is not pages:
            scales = _kv_scales(layer, self.kv_cache_dtype)
            if self._sinks is None:  # not every weight loader calls this method
                self.process_weights_after_loading(pages.dtype)
            cache = view_pages(pages, self.num_kv_heads, *scales)
            self._pages, self._cache = pages, replace(cache, sinks=self._sinks)
        return self._cache

    def _reserve(self, query: torch.Tensor) -> None:
        """Reserve the bytes that the backends will allocate, so that vLLM's measurement includes them.

        vLLM also runs forwards without metadata when it captures graphs; only the layer's first one reserves.
        """
        if self._reserved or query.device.type == "cpu":
            return
        self._reserved = True
        backend, shape, made = self._geometries(query.dtype, query.device.type)
        RESERVATION.hold(shape, arena_bytes(backend, made), query.device)

    def _geometries(self, dtype: torch.dtype, device: str) -> tuple[LoadedBackend, AttentionShape, Geometries]:
        """Return this layer's backend, shape and geometries. Raise EngineError if the backend refuses a geometry."""
        backend = chosen_backend(self._config, device)
        shape = self._described(self._config.cache_config.block_size, dtype)
        return backend, shape, Geometries.of(backend, shape, engine_limits(self._config), profile_of(device))


def _refuse(alibi_slopes: list[float] | None, attn_type: str, extra: dict[str, Any]) -> None:
    if attn_type != AttentionType.DECODER:
        raise EngineError(f"attention of type {attn_type} is not served, only decoder attention; {OTHER_BACKEND}")
    if alibi_slopes is not None:
        raise EngineError(f"the model has ALiBi slopes, which are not served; {OTHER_BACKEND}")
    given = sorted(name for name, value in extra.items() if value is not None)
    if given:
        raise EngineError(f"the layer has {', '.join(given)}, which is not served; {OTHER_BACKEND}")


def _kv_scales(layer: Any, kv_cache_dtype: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the layer's fp8 scales of K and V on the device, or (None, None) if KV is not fp8."""
    return (layer._k_scale, layer._v_scale) if is_fp8(kv_cache_dtype) else (None, None)
