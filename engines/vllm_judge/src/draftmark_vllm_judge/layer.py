"""Creates vLLM attention layers with a metadata builder and KV memory, by vLLM's own classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from draftmark import Geometry
from draftmark_contract.check import Refused, Unjudged
from draftmark_contract.judge.driver import SCALES

from .config import FP8, LAYER, SECOND, dtype_of, takes, vllm_config
from .memory import Memory
from .predicates import reasons_against
from .sequence_memory import NO_PAGES

REFUSALS = (NotImplementedError, ValueError, AssertionError)
"""Errors that vLLM's classes raise on inputs they do not serve. A server would stop with the same text."""


class Layers:
    """Holds two layers of one KV group. Most judge items run only the first; items about shared metadata run both.

    Args:
        num_pages: pages of each layer's KV memory; None if the backend keeps KV in its own memory.
        cache: more arguments of vLLM's `CacheConfig`.

    Raises:
        Refused: vLLM's predicates, its platform, or the constructors of its classes, refuse the geometry.
        Unjudged: the backend needs a model runner of its own.
    """

    def __init__(
        self,
        backend: Any,
        geometry: Geometry,
        num_pages: int | None,
        device: str,
        cache: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if reasons := reasons_against(backend, geometry):
            raise Refused("; ".join(reasons))
        self.backend, self.geometry, self.device = backend, geometry, torch.device(device)
        try:
            self.config = vllm_config(geometry, **cache)
        except REFUSALS as error:
            raise Refused(f"its platform refuses: {_words(error)}") from error
        with self.current():
            try:
                self.layers = {name: self._layer(name) for name in (LAYER, SECOND)}
                self.spec = self._spec()
                self.builder = backend.get_builder_cls()(self.spec, list(self.layers), self.config, self.device)
            except REFUSALS as error:
                raise Refused(f"its constructor refuses: {_words(error)}") from error
        _check_build(self.builder)
        self.caches: dict[str, Memory] = {}
        if num_pages is None:
            for layer in self.layers.values():
                empty = torch.empty(0, device=self.device)
                layer.kv_cache = [empty] if isinstance(layer.kv_cache, list) else empty
            return
        for name, layer in self.layers.items():
            with self.current(), torch.inference_mode(False):
                memory, axis = self._cache(num_pages)
            layer.kv_cache = [memory] if isinstance(layer.kv_cache, list) else memory
            self.caches[name] = Memory(memory, axis, geometry)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Set vLLM's current configuration, and torch's default dtype to the query dtype, inside the context."""
        from vllm.config import set_current_vllm_config

        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype_of(self.geometry.attention.q_dtype))
        try:
            with set_current_vllm_config(self.config), torch.inference_mode():
                yield
        finally:
            torch.set_default_dtype(before)

    def run(self, metadata: Any, slots: torch.Tensor, *rows: torch.Tensor, name: str = LAYER) -> torch.Tensor:
        """Run one layer in vLLM's forward context.

        Args:
            metadata: metadata of the group, or a dict with metadata by layer.
            slots: int64 slot of each row.
            rows: q, k and v.
            name: the layer.

        Returns:
            The output, in the shape of q.
        """
        from vllm.forward_context import set_forward_context

        of_layers = metadata if isinstance(metadata, dict) else dict.fromkeys(self.layers, metadata)
        more = takes(set_forward_context, {"slot_mapping": dict.fromkeys(self.layers, slots)})
        with self.current(), set_forward_context(of_layers, self.config, num_tokens=len(rows[0]), **more):
            out: torch.Tensor = self.layers[name](*rows)
        return out.view(rows[0].shape)

    @property
    def writes_separately(self) -> bool:
        """True if the layer stores KV by a separate call, not inside its forward."""
        inside = getattr(self.backend, "forward_includes_kv_cache_update", True)
        return not inside and hasattr(self.layers[LAYER].impl, "do_kv_cache_update")

    def store(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store KV in the first layer by the separate call that writes KV outside forward."""
        layer = self.layers[LAYER]
        cache = layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache
        with self.current():
            layer.impl.do_kv_cache_update(layer, k, v, cache, slots)

    def _layer(self, name: str) -> Any:
        from .api import Attention

        a = self.geometry.attention
        layer = Attention(
            a.num_qo_heads,
            a.head_dim,
            a.softmax_scale,
            num_kv_heads=a.num_kv_heads,
            cache_config=self.config.cache_config,
            logits_soft_cap=a.logits_soft_cap or None,
            per_layer_sliding_window=a.window_left + 1 if a.window_left >= 0 else None,
            prefix=name,
            attn_backend=self.backend,
        ).to(self.device)
        if a.kv_dtype == FP8:
            _set_scales(layer)
        return layer

    def _spec(self) -> Any:
        """Return the layer's own KV spec, with the geometry's page size. A window does not change the page layout."""
        spec = next(iter(self.layers.values())).get_kv_cache_spec(self.config)
        if spec.block_size != self.geometry.attention.page_size:
            spec = replace(spec, block_size=self.geometry.attention.page_size)
        customize = getattr(self.backend, "customize_spec", None)
        return customize(spec) if customize else spec

    def _cache(self, num_pages: int) -> tuple[torch.Tensor, int]:
        """Return KV memory in the backend's own shape and layout, and the axis that counts pages."""
        if hasattr(self.backend, "supported_kv_cache_layouts"):
            return self._by_layout(num_pages), 0
        return self._by_shape(num_pages)

    def _by_layout(self, num_pages: int) -> torch.Tensor:
        """Allocate KV memory in vLLM 0.29 and newer.

        Its logical shape is ``[pages, head slots, tokens, content]``; the backend's first layout gives its order.
        """
        spec, layouts = self.spec, self.backend.supported_kv_cache_layouts()
        content = spec.state_content_size_bytes // spec.dtype.itemsize
        shape = (num_pages, spec.num_heads, spec.block_size, content)
        order = layouts[0].layer_view_order if layouts else (0, 1, 2, 3)
        return _strided(shape, order, spec.dtype, self.device)

    def _by_shape(self, num_pages: int) -> tuple[torch.Tensor, int]:
        """Allocate KV memory in vLLM up to 0.28, by the backend's shape and stride order. Also return the page axis."""
        a, spec = self.geometry.attention, self.spec
        dtype = "fp8" if a.kv_dtype == FP8 else "auto"

        def shape_for(pages: int) -> tuple[int, ...]:
            values = {"cache_dtype_str": dtype}
            more = takes(self.backend.get_kv_cache_shape, values)
            found = self.backend.get_kv_cache_shape(pages, spec.block_size, spec.num_kv_heads, spec.head_size, **more)
            return tuple(found)

        shape, other = shape_for(num_pages), shape_for(num_pages + 1)
        axis = next((n for n, (one, two) in enumerate(zip(shape, other, strict=True)) if one != two), None)
        if axis is None:
            raise Unjudged(NO_PAGES.format(shape=f"get_kv_cache_shape returns {shape}"))
        try:
            order = tuple(self.backend.get_kv_cache_stride_order())
        except (AttributeError, NotImplementedError):
            order = tuple(range(len(shape)))
        return _strided(shape, order, spec.dtype, self.device), axis


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _check_build(builder: Any) -> None:
    """Check that the builder takes the arguments that vLLM's runner passes.

    Raises:
        Unjudged: it takes others, which only a model runner of its own passes.
    """
    try:
        inspect.signature(builder.build).bind(common_prefix_len=0, common_attn_metadata=None)
    except TypeError as error:
        raise Unjudged(f"its build() is not the one that vLLM's runner calls: {error}") from error


def _strided(shape: tuple[int, ...], order: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros of a logical shape. `order` lists the logical axes in memory order, as vLLM allocates them."""
    physical = torch.zeros([shape[axis] for axis in order], dtype=dtype, device=device)
    return physical.permute([order.index(axis) for axis in range(len(shape))])


def _set_scales(layer: Any) -> None:
    """Set the layer's fp8 scales, in every attribute where this vLLM release keeps a copy of them."""
    for letter, scale in zip("kv", SCALES, strict=True):
        for name in [one for one in vars(layer) | layer._buffers if re.fullmatch(rf"_{letter}_scale(_\w+)?", one)]:
            held = getattr(layer, name)
            if isinstance(held, torch.Tensor):
                held.fill_(scale)
            elif isinstance(held, float):
                setattr(layer, name, scale)
