"""Attention layers of a model on a backend: one geometry, backend and KV pool per distinct attention shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch

from draftmark import (
    AttentionShape,
    Geometry,
    HostLengthsNeed,
    LoadedBackend,
    Mode,
    StateGeometry,
    StateShape,
)
from draftmark.runtime import (
    Arena,
    BoundBackend,
    Causal,
    Exact,
    ForwardBatch,
    HostLengths,
    KVCache,
    KVPool,
    SequenceLengths,
    Unknown,
    VerifyResult,
    commit_round,
    device_profile,
    validate,
)

from .config import EngineConfig
from .geometry_pair import check_pair
from .memory import require_memory
from .models import LayerAttention
from .states import StateLayers, state_geometries, state_slots


class Layered(Protocol):
    """Model with attention layers: a `CausalLM` or a draft head."""

    @property
    def layers(self) -> tuple[LayerAttention, ...]:
        """Attention parameters of each layer."""

    @property
    def sinks(self) -> tuple[torch.Tensor | None, ...]:
        """Attention sinks of each layer: float32 ``[num_qo_heads]`` on the device; None for a layer without sinks."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of q, k and v."""

    @property
    def device(self) -> torch.device:
        """Device of the weights."""


class PagePlan(NamedTuple):
    """Layout of the page ids, which the KV pools of all models share.

    Attributes:
        null: number of pages at the start of every pool that no request owns.
        total: number of pages of every pool, null pages included.
        unique_slots: True if a backend needs unique KV slots for padding rows too.
    """

    null: int
    total: int
    unique_slots: bool


@dataclass(frozen=True)
class LayerGroup:
    """Holds the geometry, arena, backend and KV pool of the layers that share one attention shape and kind of block."""

    geometry: Geometry
    arena: Arena
    backend: BoundBackend
    pool: KVPool
    causal_block: bool = False

    def of(self, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with the tail of these layers: causal draft blocks have their own."""
        causal = self.causal_block and batch.mode is Mode.DRAFT_BLOCK
        return replace(batch, tail=Causal()) if causal else batch


class AttentionLayers:
    """Runs all layers of one model that read earlier tokens; implements `StateStep` for its forward.

    Each layer's attention runs on the backend of its group. All groups share page ids, page table and lengths, so one
    batch serves all groups. It serves the layers with recurrent state too.

    Attributes:
        model: the model or draft head.
        geometry: geometry of the first layer group; batch-level formulas are equal in every group.
        host_need: the strongest need for host lengths over all groups.
        pages: the page ids of every pool.
        tree_ops: tree operations of a round, from the backend or torch; equal in every group.
        states: layers with recurrent state; None for a model without any.

    Args:
        geometries: one for each distinct layer of the model; see `open_layers`.
        states: one for each distinct shape of its layers with recurrent state.
    """

    def __init__(
        self,
        model: Layered,
        loaded: LoadedBackend,
        config: EngineConfig,
        geometries: Sequence[Geometry],
        pages: PagePlan,
        states: Sequence[StateGeometry] = (),
    ) -> None:
        self.model, device = model, model.device
        shapes = list(dict.fromkeys(model.layers))
        self.geometry = geometries[0]
        self.pages = pages
        self.host_need = HostLengthsNeed.strongest(loaded.requirements(one).host_lengths for one in geometries)
        self.tree_ops = loaded.tree_ops(self.geometry, device)
        self.groups = []
        for shape, geometry in zip(shapes, geometries, strict=True):
            arena = loaded.allocate(geometry, device, guard=config.guard)
            pool = KVPool(geometry, model.layers.count(shape), pages.total, pages.null, device)
            self.groups.append(LayerGroup(geometry, arena, loaded.bind(geometry, arena), pool, shape.causal_block))
        self._homes = [self.groups[shapes.index(one)] for one in model.layers]
        self._caches = [
            replace(group.pool.layers[model.layers[:i].count(one)], sinks=model.sinks[i] if one.sinks else None)
            for i, (one, group) in enumerate(zip(model.layers, self._homes, strict=True))
        ]
        self.states: StateLayers | None = None
        if states:
            self.states = StateLayers(_states(model), states, loaded, config, device, pages.unique_slots)
        self._batch: ForwardBatch | None = None
        self._batches: dict[int, ForwardBatch] = {}

    def lengths_at_capture(self, padded_reqs: int) -> HostLengths:
        """Return the host lengths that `plan` gets before a capture on null rows (dummy requests).

        Decisions of `plan` on the host are frozen in the graph. So it plans for requests of the longest possible
        length. A backend that needs exact lengths gets the null rows' lengths, which are 0.
        """
        if self.host_need is HostLengthsNeed.EXACT:
            return Exact((0,) * padded_reqs)
        return Unknown(padded_reqs, self.geometry.max_prefix_len)

    def plan(self, batch: ForwardBatch) -> None:
        """Run every backend's host-side plan. Call this before each forward and before each replay."""
        validate(batch, self.geometry)
        for group in self.groups:
            group.backend.plan(group.of(batch))
        if self.states is not None:
            self.states.plan(batch)

    def begin(self, batch: ForwardBatch) -> None:
        """Write every backend's metadata on the device. The next forward attends over `batch`."""
        self._batch = batch
        self._batches = {id(group): group.of(batch) for group in self.groups}
        for group in self.groups:
            group.backend.write_metadata(self._batches[id(group)])
        if self.states is not None:
            self.states.write_metadata(batch)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        """Store the rows' KV and compute attention; see `AttentionStep.attend`."""
        self.store(layer, k, v)
        group, cache, q = self._homes[layer], self._caches[layer], q.contiguous()
        out = q.new_empty(*q.shape[:-1], group.geometry.attention.value_width)
        group.backend.attend(q, cache, self._batches[id(group)], out)
        return out

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Store the rows' KV without attention; k and v as in `attend`."""
        assert self._batch is not None, "begin() comes before the forward"
        group = self._homes[layer]
        batch = self._batches[id(group)]
        group.backend.write_kv(k.contiguous(), None if v is None else v.contiguous(), self._caches[layer], batch)

    def convolve(self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Run the short convolution of a layer with state; see `StateRun.convolve`."""
        assert self._batch is not None and self.states is not None, "begin() comes before the forward"
        return self.states.convolve(layer, x, weight, bias, self._batch)

    def recur(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run the recurrence of a layer with state; see `StateRun.recur`."""
        assert self._batch is not None and self.states is not None, "begin() comes before the forward"
        return self.states.recur(layer, q, k, v, log_decay, beta, self._batch)

    def of_layers(self) -> list[tuple[LayerGroup, KVCache]]:
        """Return the group and the KV cache of each decoder layer."""
        return list(zip(self._homes, self._caches, strict=True))

    def check_guards(self) -> None:
        """Raise `GuardError` if a step wrote past a buffer. Reads the device, and only in guard mode."""
        for group in self.groups:
            if group.arena.guarded:
                group.arena.check()
        if self.states is not None:
            self.states.check_guards()

    def commit(
        self, batch: ForwardBatch, accepted: VerifyResult | None, lengths: SequenceLengths, rows: torch.Tensor
    ) -> torch.Tensor | None:
        """End a forward of the model with `commit_round`; return its result. Captured."""
        kv, states = [(self.tree_ops, group.pool) for group in self.groups], self.states
        if states is None:
            return commit_round(batch, accepted, lengths, rows, kv)
        return commit_round(batch, accepted, lengths, rows, kv, states.pairs, states.save_slots(rows))


def open_layers(
    target: Layered, draft: Layered | None, loaded: LoadedBackend, config: EngineConfig
) -> list[AttentionLayers]:
    """Open the layers of the target and of the draft model over one set of page ids.

    Returns:
        The target's layers, then the draft model's if there is one.

    Raises:
        GeometryError: a layer has no valid geometry.
        BackendRefusal: the backend does not support a layer.
        RequestError: the KV pages and buffers exceed the device's memory.
    """
    how = config.speculation
    models = [(target, how.target_modes)] + ([] if draft is None else [(draft, how.draft_modes)])
    geometries = [
        [_geometry(layer, model, config, modes) for layer in dict.fromkeys(model.layers)] for model, modes in models
    ]
    every = [geometry for of_one in geometries for geometry in of_one]
    states = state_geometries(_states(target), loaded, config, target.device)
    for geometry in every:
        loaded.require(geometry)
    if draft is not None:
        check_pair(geometries[0][0], geometries[1][0])
    unique = any(loaded.requirements(geometry).unique_slots for geometry in every)
    null: int = every[0].null_pages(unique)
    total: int = config.num_pages or null + config.max_num_reqs * every[0].max_pages_per_req
    pages = PagePlan(null, total, unique)
    counted = [model.layers.count(one) for model, _ in models for one in dict.fromkeys(model.layers)]
    require_memory(zip(every, counted, strict=True), loaded, target.device, total, states, state_slots(config))
    loaded.prepare(every, target.device)
    return [
        AttentionLayers(model, loaded, config, mine, pages, states if model is target else ())
        for (model, _), mine in zip(models, geometries, strict=True)
    ]


def _states(model: Layered) -> tuple[StateShape, ...]:
    """Return the shape of each layer with recurrent state. Draft heads have none."""
    found: tuple[StateShape, ...] = getattr(model, "states", ())
    return found


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
        sinks=layer.sinks,
        value_dim=layer.value_dim,
        latent=layer.latent,
    )
    return Geometry.create(shape, config.limits, config.draft_shape, device_profile(model.device), modes)
