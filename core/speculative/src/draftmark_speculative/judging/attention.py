"""Attention of a drafter over its target's layers, with a record of what each draft row reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftmark import AttentionShape
from draftmark.runtime import BoundBackend, ForwardBatch, KVCache

from ..layers import AttentionLayers


@dataclass(frozen=True)
class DraftLayer:
    """One layer as a drafter attends to it: backend, attention shape and KV."""

    backend: BoundBackend
    shape: AttentionShape
    cache: KVCache


@dataclass(frozen=True)
class Reading:
    """Holds what the row of one request reads in one layer of one forward.

    Attributes:
        position: model position of the row.
        shape: attention shape of the layer.
        scales: k_scale and v_scale; 1 where the cache has none.
        k, v: ``[position + 1, num_kv_heads, head_dim or value_dim]``, KV of all positions up to the row's own in its
            page table.
    """

    position: int
    shape: AttentionShape
    scales: tuple[float, float]
    k: torch.Tensor
    v: torch.Tensor


class DraftAttention:
    """Attention of a drafter that shares its target's KV, scales, windows and positions.

    Subclasses imitate an engine's drafter: they replace `layers`, `positions` or `begin`.

    Attributes:
        layers: one entry per decoder layer of the target.
        readings: what the greedy row of each request reads in the newest forward, by layer.
        path: tail slots of the greedy row's ancestors and of that row itself, which comes last.
    """

    def __init__(self, target: AttentionLayers) -> None:
        self.layers = target_layers(target)
        self.readings: dict[int, list[Reading]] = {}
        self.path: tuple[int, ...] = (0,)
        self._batch: ForwardBatch | None = None
        self._positions: list[int] = []

    def positions(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the model positions of the batch's rows, int64 ``[num_rows]``."""
        return batch.positions

    def begin(self, batch: ForwardBatch) -> None:
        """Plan a forward and write its metadata."""
        self._batch, self.readings, self._positions = batch, {}, self.positions(batch).tolist()
        for backend in {id(one.backend): one.backend for one in self.layers}.values():
            backend.plan(batch)
            backend.write_metadata(batch)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        """Store the rows' KV and compute attention, as `AttentionStep.attend`; record what the rows read."""
        assert self._batch is not None, "begin() comes before the forward"
        one, q = self.layers[layer], q.contiguous()
        out = q.new_empty(*q.shape[:-1], one.shape.value_width)
        one.backend.write_kv(k.contiguous(), None if v is None else v.contiguous(), one.cache, self._batch)
        one.backend.attend(q, one.cache, self._batch, out)
        rows = self._batch.q_lens[0]
        self.readings[layer] = [
            reading(one, self._batch.page_table[n], self._positions[n * rows + self.path[-1] % rows], self.path)
            for n in range(self._batch.num_reqs)
        ]
        return out


def target_layers(target: AttentionLayers) -> list[DraftLayer]:
    """Return the target's own layers."""
    return [DraftLayer(group.backend, group.geometry.attention, cache) for group, cache in target.of_layers()]


def reading(layer: DraftLayer, page_row: torch.Tensor, position: int, path: Sequence[int] = (0,)) -> Reading:
    """Return what a row at this position of a request reads in a layer, given the request's page-table row.

    Args:
        path: tail slots of the row's ancestors and of the row; its other keys are the tokens before them.
    """
    place = torch.arange(position + 1, device=page_row.device)
    place[-len(path) :] = position + 1 - len(path) + torch.tensor(path, device=page_row.device)[-(position + 1) :]
    page, offset = page_row.long()[place // layer.shape.page_size], place % layer.shape.page_size
    cache = layer.cache
    scales = tuple(1.0 if one is None else float(one) for one in (cache.k_scale, cache.v_scale))
    k, v = cache.k[page, offset].clone(), cache.v[page, offset].clone()
    return Reading(position, layer.shape, (scales[0], scales[1]), k, v)
