"""The model's layers on a backend: one geometry, backend and KV pool per distinct attention shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..arena import Arena
from ..backend import AttentionBackend
from ..batch import ForwardBatch, validate
from ..cache import KVPool
from ..devices import profile
from ..geometry import AttentionShape, Geometry
from ..loaded import Backend
from ..metadata import HostLengthsNeed
from .config import EngineConfig
from .models import CausalLM, LayerAttention


@dataclass(frozen=True)
class LayerGroup:
    """Layers that share one attention shape."""

    geometry: Geometry
    arena: Arena
    backend: AttentionBackend
    pool: KVPool


class AttentionLayers:
    """Dispatches each layer's attention to its group; the `AttentionStep` of a model forward.

    All groups share page ids, page table and lengths, so one batch serves them all.

    Attributes:
        geometry: the first group's; batch-level formulas are the same in every group.
        host_need: the strongest need for host lengths over all groups.
        null_pages: pages at the start of every pool that no request owns.
        num_pages: pages of every pool.
    """

    def __init__(self, model: CausalLM, loaded: Backend, config: EngineConfig) -> None:
        device = model.device
        shapes = list(dict.fromkeys(model.layers))
        geometries = [_geometry(shape, model, config) for shape in shapes]
        for geometry in geometries:
            loaded.require(geometry)
        self.geometry = geometries[0]
        unique = any(loaded.unique_slots(geometry) for geometry in geometries)
        self.unique_slots = unique
        self.null_pages: int = self.geometry.null_pages(unique)
        self.num_pages = config.num_pages or self.null_pages + config.max_num_reqs * self.geometry.max_pages_per_req
        needs = [loaded.host_lengths(geometry) for geometry in geometries]
        self.host_need = HostLengthsNeed.EXACT if HostLengthsNeed.EXACT in needs else needs[0]
        self.groups = []
        for shape, geometry in zip(shapes, geometries, strict=True):
            arena = loaded.allocate(geometry, device, guard=config.guard)
            pool = KVPool(geometry, model.layers.count(shape), self.num_pages, self.null_pages, device)
            self.groups.append(LayerGroup(geometry, arena, loaded.bind(geometry, arena), pool))
        self._homes = _homes(model.layers, shapes)
        self._batch: ForwardBatch | None = None

    def plan(self, batch: ForwardBatch) -> None:
        """Host side of every backend; before the forward, and before every replay."""
        validate(batch, self.geometry)
        for group in self.groups:
            group.backend.plan(batch)

    def begin(self, batch: ForwardBatch) -> None:
        """Device side: metadata of every backend. The forward that follows attends over `batch`."""
        self._batch = batch
        for group in self.groups:
            group.backend.write_metadata(batch)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store the rows' KV and attend; see `AttentionStep`."""
        assert self._batch is not None, "begin() comes before the forward"
        home, index = self._homes[layer]
        group = self.groups[home]
        cache = group.pool.layers[index]
        q = q.contiguous()
        out = torch.empty_like(q)
        group.backend.write_kv(k.contiguous(), v.contiguous(), cache, self._batch)
        group.backend.attend(q, cache, self._batch, out)
        return out

    def check_guards(self) -> None:
        """Raise `GuardError` when a step wrote past a buffer; reads the device, and only in guard mode."""
        for group in self.groups:
            if group.arena.guarded:
                group.arena.check()

    def move(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy KV between slots in every layer; see `KVPool.move`."""
        for group in self.groups:
            group.pool.move(source, target)


def _geometry(layer: LayerAttention, model: CausalLM, config: EngineConfig) -> Geometry:
    name = str(model.dtype).removeprefix("torch.")
    shape = AttentionShape(
        num_qo_heads=layer.num_qo_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        page_size=config.page_size,
        q_dtype=name,
        kv_dtype=name,
        softmax_scale=layer.softmax_scale,
        window_left=layer.window_left,
        logits_soft_cap=layer.logits_soft_cap,
    )
    return Geometry.create(shape, config.limits, config.draft_shape, profile(model.device))


def _homes(layers: Sequence[LayerAttention], shapes: Sequence[LayerAttention]) -> list[tuple[int, int]]:
    """For each layer, its group and its index in the group's pool."""
    counts = [0] * len(shapes)
    homes = []
    for layer in layers:
        group = shapes.index(layer)
        homes.append((group, counts[group]))
        counts[group] += 1
    return homes
