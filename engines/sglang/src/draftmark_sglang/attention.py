"""Attention of all layers of one runner: one bound backend for each distinct shape, and one set of batch buffers."""

from __future__ import annotations

from typing import Any

import torch

from draftmark import AttentionShape, LoadedBackend, Mode
from draftmark.runtime import (
    BatchBuffers,
    BoundBackend,
    ForwardBatch,
    HostLengths,
    KVCache,
    TreeOps,
    Unknown,
    device_profile,
)

from .facts import RunnerFacts
from .geometries import geometry_of, needs_host_lengths
from .layers import attention_layers, shape_of, sinks_of_layers
from .page_table import as_pages
from .prefixes import Prefixes
from .state_layers import StateLayers
from .window_pool import WindowPool, windowed_layers


class LayerAttention:
    """Runs a `ForwardBatch` on the attention layers of an SGLang `ModelRunner`, and owns the buffers.

    Args:
        states: recurrent layers of the model, which share the batches; None if draftmark runs none.

    Attributes:
        geometry: the geometry of the first attention shape. All shapes have its limits, draft shape and page size.
        arenas: the backends' buffers, one arena for each shape.
        buffers: tensors of fixed address for all batches except EXTEND batches.
        prefixes: lengths and page tables in `buffers`.
        tree_ops: operations on draft trees. All shapes use them, because they do not depend on heads.
        needs_host_lengths: whether SGLang must copy lengths to the host.
    """

    def __init__(
        self,
        runner: Any,
        loaded: LoadedBackend,
        facts: RunnerFacts,
        modes: tuple[Mode, ...],
        states: StateLayers | None = None,
    ) -> None:
        self._loaded, self._facts, self._modes, self._states = loaded, facts, modes, states
        self._pool = runner.token_to_kv_pool
        self._layers = attention_layers(runner.model)
        self._sinks = sinks_of_layers(runner.model, self._layers)
        self._windowed = windowed_layers(self._pool)
        self._scales: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor, KVCache]] = {}
        self._rows: dict[int, tuple[torch.Tensor, KVCache]] = {}
        self.allocate(0)

    def allocate(self, capture_batch_size: int) -> None:
        """Allocate all buffers.

        Args:
            capture_batch_size: requests of the largest CUDA graph; 0 if SGLang has not given it. Buffers always hold
            at least the requests that SGLang serves.
        """
        device, profile = torch.device(self._facts.device), device_profile(self._facts.device)
        shapes = {
            layer.layer_id: (
                shape_of(layer, self._facts, layer.layer_id in self._sinks),
                layer.layer_id in self._windowed,
            )
            for layer in self._layers
        }
        interval = self._states.interval if self._states is not None else 0
        geometries = {
            shape: geometry_of(self._loaded, shape[0], self._facts, profile, self._modes, capture_batch_size, interval)
            for shape in dict.fromkeys(shapes.values())
        }
        self._loaded.prepare(list(geometries.values()), device)
        self.arenas = [self._loaded.allocate(geometry, device) for geometry in geometries.values()]
        bound = {
            # `checked=False`: the model uses positions that SGLang computes itself, so neither the batch's positions
            # nor its other contents are checked.
            shape: self._loaded.bind(geometry, arena, checked=False)
            for (shape, geometry), arena in zip(geometries.items(), self.arenas, strict=True)
        }
        self._backend_of_layer: dict[int, BoundBackend] = {layer_id: bound[shape] for layer_id, shape in shapes.items()}
        self._bound: dict[tuple[AttentionShape, bool], BoundBackend] = bound
        self.geometry = next(iter(geometries.values()))
        self.needs_host_lengths = needs_host_lengths(self._loaded, list(geometries.values()))
        states = None if self._states is None else self._states.allocate(capture_batch_size)
        self.buffers = BatchBuffers(self.geometry, device, states)
        self.prefixes = Prefixes(self.buffers)
        self._window_pool = WindowPool(self._pool, self.prefixes, self._facts.page_size) if self._windowed else None
        self._batches: dict[tuple[Mode, int, int, bool], ForwardBatch] = {}
        self.tree_ops: TreeOps = self._loaded.tree_ops(self.geometry, device)

    @property
    def shapes(self) -> tuple[AttentionShape, ...]:
        """All distinct attention shapes of the layers."""
        return tuple(dict.fromkeys(shape for shape, _ in self._bound))

    def uniform(self, mode: Mode, step: int, requests: int, host: HostLengths, *, tree: bool) -> ForwardBatch:
        """Return a DECODE, VERIFY, DRAFT or DRAFT_EXTEND batch over the static buffers.

        If the host has no lengths, two batches of the same mode, step and size are equal, so the batch is cached.
        """
        if not isinstance(host, Unknown):
            return self.buffers.uniform(mode, step, requests, requests, host, tree=tree)
        key = mode, step, requests, tree
        if key not in self._batches:
            self._batches[key] = self.buffers.uniform(mode, step, requests, requests, host, tree=tree)
        return self._batches[key]

    def plan(self, batch: ForwardBatch) -> None:
        """Plan the batch on the host, outside a graph."""
        for (_, windowed), backend in self._bound.items():
            backend.plan(self._with_page_table(batch, windowed))

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write every backend's metadata on the device; a CUDA graph captures this call."""
        for (_, windowed), backend in self._bound.items():
            backend.write_metadata(self._with_page_table(batch, windowed))

    def _with_page_table(self, batch: ForwardBatch, windowed: bool) -> ForwardBatch:
        """Return the batch with the page table of the layer's KV pool."""
        return batch if self._window_pool is None or not windowed else self._window_pool.with_window_table(batch)

    def forward(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Store one layer's K and V, and compute its attention.

        Args:
            q: ``[rows, …]``. Rows past the batch's rows are padding of a CUDA graph; their output is zero.
            k, v: the rows to store; None when SGLang has stored them or the layer shares another layer's cache. In a
                latent layer v is the first part of k, and is not read.
            sinks: the sinks that SGLang passes. Only their presence is checked: graphs read a copy made at start-up.

        Returns:
            ``[rows, num_qo_heads · head_dim]``; of a latent layer ``[rows, num_qo_heads · value_dim]``.

        Raises:
            NotImplementedError: SGLang passes sinks for a layer that had none at start-up, or the reverse.
        """
        if (sinks is None) == (layer.layer_id in self._sinks):
            raise NotImplementedError(
                f"layer {layer.layer_id}: SGLang passes {'no ' if sinks is None else ''}attention sinks, but the "
                f"model had {'some' if sinks is None else 'none'} at start-up; use one of SGLang's own backends"
            )
        backend, cache, rows = self._backend_of_layer[layer.layer_id], self._cache(layer), batch.num_rows
        if self._window_pool is not None:
            batch = self._with_page_table(batch, layer.layer_id in self._windowed)
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = q.new_empty(*q.shape[:2], layer.v_head_dim if self._facts.latent else layer.head_dim)
        padded = q.shape[0] > rows
        if k is not None and v is not None:
            k = k.view(-1, layer.tp_k_head_num, layer.head_dim)[:rows]
            stored_v = None if self._facts.latent else v.view(-1, layer.tp_k_head_num, layer.head_dim)[:rows]
            backend.write_kv(k, stored_v, cache, batch)
        if padded:
            backend.attend(q[:rows], cache, batch, out[:rows])
            out[rows:].zero_()
        else:
            backend.attend(q, cache, batch, out)
        return out.flatten(1)

    def _cache(self, layer: Any) -> KVCache:
        """Return the layer's K and V, or its latent rows, in pages.

        Each call gets the buffers from the pool: with a hierarchical cache the pool waits until the layer is loaded.
        """
        if self._facts.latent:
            return self._latent_cache(layer)
        k, v = self._pool.get_kv_buffer(layer.layer_id)
        known = self._caches.get(layer.layer_id)
        if known is not None and known[0] is k and known[1] is v:
            return known[2]
        page_size = self._facts.page_size
        cache = KVCache(
            as_pages(k, page_size), as_pages(v, page_size), *self._scales_of(layer), self._sinks.get(layer.layer_id)
        )
        self._caches[layer.layer_id] = k, v, cache
        return cache

    def _latent_cache(self, layer: Any) -> KVCache:
        rows = self._pool.get_key_buffer(layer.layer_id)
        known = self._rows.get(layer.layer_id)
        if known is not None and known[0].data_ptr() == rows.data_ptr():
            return known[1]
        pages = as_pages(rows, self._facts.page_size)[:, :, 0]
        cache = KVCache.latent(pages, self._scales_of(layer)[0], value_dim=layer.v_head_dim)
        self._rows[layer.layer_id] = rows, cache
        return cache

    def _scales_of(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the layer's fp8 scales of K and V, in tensors of fixed address because CUDA graphs read them."""
        if self._facts.kv_dtype != "float8_e4m3fn":
            return None, None
        if layer.layer_id not in self._scales:
            self._scales[layer.layer_id] = (_scale(layer.k_scale, self._facts), _scale(layer.v_scale, self._facts))
        return self._scales[layer.layer_id]


def _scale(scale: Any, facts: RunnerFacts) -> torch.Tensor:
    """Convert SGLang's scale (a tensor, a number, or None for 1) to float32 ``[1]`` on the device."""
    value = 1.0 if scale is None else scale
    return torch.as_tensor(value, dtype=torch.float32, device=facts.device).detach().reshape(1).clone()
