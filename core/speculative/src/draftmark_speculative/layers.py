"""A model's layers on a backend: one geometry, backend and KV pool per distinct attention shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from draftmark.arena import Arena
from draftmark.backend import AttentionBackend
from draftmark.batch import ForwardBatch, validate
from draftmark.cache import KVPool
from draftmark.devices import device_profile
from draftmark.geometry import TARGET_MODES, AttentionShape, Geometry, Mode
from draftmark.lengths import Exact, HostLengths, Unknown
from draftmark.loaded import LoadedBackend
from draftmark.requirements import HostLengthsNeed
from draftmark.tree import VerifyResult

from .config import EngineConfig
from .models import LayerAttention


class Layered(Protocol):
    """What has attention layers: a `CausalLM`, or a draft head."""

    @property
    def layers(self) -> tuple[LayerAttention, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...


@dataclass(frozen=True)
class Pages:
    """The page ids that the pools of all models share.

    Attributes:
        null: pages at the start of every pool that no request owns.
        total: pages of every pool.
        unique_slots: whether some backend needs unique KV slots for padded rows too.
    """

    null: int
    total: int
    unique_slots: bool

    @classmethod
    def plan(cls, loaded: LoadedBackend, geometries: Sequence[Geometry], config: EngineConfig) -> Pages:
        """Enough for every geometry; see `EngineConfig.num_pages`."""
        unique = any(loaded.requirements(geometry).unique_slots for geometry in geometries)
        null: int = geometries[0].null_pages(unique)
        total = config.num_pages or null + config.max_num_reqs * geometries[0].max_pages_per_req
        return cls(null, total, unique)


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
        pages: the page ids of every pool.
        tree_ops: what a round does with its trees, the backend's own or torch's; the same in every group.

    Args:
        geometries: of `geometries_of` the same model.
    """

    def __init__(
        self, model: Layered, loaded: LoadedBackend, config: EngineConfig, geometries: Sequence[Geometry], pages: Pages
    ) -> None:
        device = model.device
        shapes = list(dict.fromkeys(model.layers))
        self.geometry = geometries[0]
        self.pages = pages
        self.host_need = HostLengthsNeed.strongest(loaded.requirements(one).host_lengths for one in geometries)
        self.tree_ops = loaded.tree_ops(self.geometry, device)
        self.groups = []
        for shape, geometry in zip(shapes, geometries, strict=True):
            arena = loaded.allocate(geometry, device, guard=config.guard)
            pool = KVPool(geometry, model.layers.count(shape), pages.total, pages.null, device)
            self.groups.append(LayerGroup(geometry, arena, loaded.bind(geometry, arena), pool))
        self._homes = _homes(model.layers, shapes)
        self._batch: ForwardBatch | None = None

    def lengths_at_capture(self, padded_reqs: int) -> HostLengths:
        """What `plan` is told of the null rows that a graph is captured on.

        What it decides on the host is frozen in the graph, so it plans as if every request could be as long as can
        be; a backend that needs exact lengths is told those of the null rows.
        """
        if self.host_need is HostLengthsNeed.EXACT:
            return Exact((0,) * padded_reqs)
        return Unknown(padded_reqs, self.geometry.max_prefix_len)

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

    def compact(self, batch: ForwardBatch, kept: VerifyResult) -> None:
        """Make the kept path's KV contiguous in every layer; see `TreeOps.compact`."""
        for group in self.groups:
            self.tree_ops.compact(group.pool, batch, kept)


def geometries_of(
    model: Layered, loaded: LoadedBackend, config: EngineConfig, modes: tuple[Mode, ...] = TARGET_MODES
) -> list[Geometry]:
    """A geometry per distinct layer, all of them served by the backend.

    Raises:
        GeometryError, BackendRefusal: one that cannot be.
    """
    geometries = [_geometry(layer, model, config, modes) for layer in dict.fromkeys(model.layers)]
    for geometry in geometries:
        loaded.require(geometry)
    return geometries


def _geometry(layer: LayerAttention, model: Layered, config: EngineConfig, modes: tuple[Mode, ...]) -> Geometry:
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
    return Geometry.create(shape, config.limits, config.draft_shape, device_profile(model.device), modes)


def _homes(layers: Sequence[LayerAttention], shapes: Sequence[LayerAttention]) -> list[tuple[int, int]]:
    """For each layer, its group and its index in the group's pool."""
    counts = [0] * len(shapes)
    homes = []
    for layer in layers:
        group = shapes.index(layer)
        homes.append((group, counts[group]))
        counts[group] += 1
    return homes
