"""The attention of all layers of one runner: a bound backend for each distinct shape, and one set of batch buffers."""

from __future__ import annotations

from typing import Any

import torch

from draftmark import AttentionShape, LoadedBackend, Mode
from draftmark.runtime import (
    AttentionBackend,
    BatchBuffers,
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
from .window_pool import WindowPool, windowed_layers


class LayerAttention:
    """What runs a `ForwardBatch` on a runner's layers.

    Attributes:
        geometry: that of the first shape; limits, draft shape and page size are those of all.
        arenas: the backends' buffers, one for each shape.
        buffers: the static tensors of every batch but an EXTEND. prefixes: their lengths and page tables.
        tree_ops: of the first shape; a tail does not depend on heads.
        needs_host_lengths: whether SGLang must bring lengths to the host.
    """

    def __init__(self, runner: Any, loaded: LoadedBackend, facts: RunnerFacts, modes: tuple[Mode, ...]) -> None:
        self._loaded, self._facts, self._modes = loaded, facts, modes
        self._pool = runner.token_to_kv_pool
        self._layers = attention_layers(runner.model)
        self._sinks = sinks_of_layers(runner.model, self._layers)
        self._windowed = windowed_layers(self._pool)
        self._scales: dict[int, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self._caches: dict[int, tuple[torch.Tensor, torch.Tensor, KVCache]] = {}
        self.open(0)

    def open(self, capture_batch_size: int) -> None:
        """Allocate everything for batches of up to `capture_batch_size` requests, or as many as SGLang serves."""
        device, profile = torch.device(self._facts.device), device_profile(self._facts.device)
        shapes = {
            layer.layer_id: (
                shape_of(layer, self._facts, layer.layer_id in self._sinks),
                layer.layer_id in self._windowed,
            )
            for layer in self._layers
        }
        geometries = {
            shape: geometry_of(self._loaded, shape[0], self._facts, profile, self._modes, capture_batch_size)
            for shape in dict.fromkeys(shapes.values())
        }
        self.arenas = [self._loaded.allocate(geometry, device) for geometry in geometries.values()]
        bound = {
            shape: self._loaded.bind(geometry, arena)
            for (shape, geometry), arena in zip(geometries.items(), self.arenas, strict=True)
        }
        self._of_layer: dict[int, AttentionBackend] = {layer_id: bound[shape] for layer_id, shape in shapes.items()}
        self._bound: dict[tuple[AttentionShape, bool], AttentionBackend] = bound
        self.geometry = next(iter(geometries.values()))
        self.needs_host_lengths = needs_host_lengths(self._loaded, list(geometries.values()))
        self.buffers = BatchBuffers(self.geometry, device)
        self.prefixes = Prefixes(self.buffers)
        self._second = WindowPool(self._pool, self.prefixes, self._facts.page_size) if self._windowed else None
        self._batches: dict[tuple[Mode, int, int, bool], ForwardBatch] = {}
        self.tree_ops: TreeOps = self._loaded.tree_ops(self.geometry, device)

    @property
    def shapes(self) -> tuple[AttentionShape, ...]:
        """Every distinct shape of the layers."""
        return tuple(dict.fromkeys(shape for shape, _ in self._bound))

    def uniform(self, mode: Mode, step: int, requests: int, host: HostLengths, *, tree: bool) -> ForwardBatch:
        """A batch over the static buffers. Where the host knows no lengths, all of one size are one and the same."""
        if not isinstance(host, Unknown):
            return self.buffers.uniform(mode, step, requests, requests, host, tree=tree)
        key = mode, step, requests, tree
        if key not in self._batches:
            self._batches[key] = self.buffers.uniform(mode, step, requests, requests, host, tree=tree)
        return self._batches[key]

    def plan(self, batch: ForwardBatch) -> None:
        """On the host, outside a graph."""
        for (_, windowed), backend in self._bound.items():
            backend.plan(self._seen(batch, windowed))

    def write_metadata(self, batch: ForwardBatch) -> None:
        """On the device; captured."""
        for (_, windowed), backend in self._bound.items():
            backend.write_metadata(self._seen(batch, windowed))

    def _seen(self, batch: ForwardBatch, windowed: bool) -> ForwardBatch:
        """The batch as layers of the first or the second KV pool see it."""
        return batch if self._second is None or not windowed else self._second.twin(batch)

    def forward(
        self,
        layer: Any,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One layer's attention, as ``[rows, num_qo_heads · head_dim]``.

        Args:
            q: ``[rows, …]``; rows behind the batch's are a graph's padding and come out as zeros.
            k, v: what to store; None where SGLang has stored it, or the layer shares another's.
            sinks: what SGLang passes; a copy was made when it started, at an address that graphs keep.

        Raises:
            NotImplementedError: sinks come with a call, and no module around the layer has any, or the reverse.
        """
        if (sinks is None) == (layer.layer_id in self._sinks):
            raise NotImplementedError(
                f"layer {layer.layer_id}: the call brings {'no ' if sinks is None else ''}attention sinks, but the "
                f"model had {'some' if sinks is None else 'none'} when SGLang started; use one of SGLang's own backends"
            )
        backend, cache, rows = self._of_layer[layer.layer_id], self._cache(layer), batch.num_rows
        if self._second is not None:
            batch = self._seen(batch, layer.layer_id in self._windowed)
        q = q.view(-1, layer.tp_q_head_num, layer.head_dim)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        padded = q.shape[0] > rows
        if k is not None and v is not None:
            k, v = (one.view(-1, layer.tp_k_head_num, layer.head_dim) for one in (k, v))
            backend.write_kv(k[:rows] if padded else k, v[:rows] if padded else v, cache, batch)
        if padded:
            backend.attend(q[:rows], cache, batch, out[:rows])
            out[rows:].zero_()
        else:
            backend.attend(q, cache, batch, out)
        return out.view(-1, layer.tp_q_head_num * layer.head_dim)

    def _cache(self, layer: Any) -> KVCache:
        """The layer's pages. Asked of the pool each time: a hierarchical cache may still be loading them."""
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

    def _scales_of(self, layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """fp8's scales at addresses of their own, which a graph may keep."""
        if self._facts.kv_dtype != "float8_e4m3fn":
            return None, None
        if layer.layer_id not in self._scales:
            self._scales[layer.layer_id] = (_scale(layer.k_scale, self._facts), _scale(layer.v_scale, self._facts))
        return self._scales[layer.layer_id]


def _scale(given: Any, facts: RunnerFacts) -> torch.Tensor:
    """SGLang's scale, a tensor, a number or None for 1, as float32 ``[1]`` on the device."""
    value = 1.0 if given is None else given
    return torch.as_tensor(value, dtype=torch.float32, device=facts.device).detach().reshape(1).clone()
