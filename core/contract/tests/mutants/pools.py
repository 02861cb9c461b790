"""Mutants G01 … G06: KV pools of several layers in one memory, with storage offsets, page strides and many layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry
from draftmark.batch import ForwardBatch
from draftmark.cache import KVCache

from .limits_and_logits import TREES
from .mutant import Mutant, around
from .scales_and_strides import IN_PLACE, _on_cache, _restored
from .trees import _compact as compacting
from .tutorial import Backend, Plugin

Tensor = torch.Tensor


def _v_after_k(cache: KVCache) -> KVCache:
    """Find V one layer's K after K, as in a pool of one layer ``[2, pages, …]``."""
    k = cache.k
    start = k.storage_offset() + k.numel()
    whole = k.untyped_storage().nbytes() // k.element_size()
    if not k.is_contiguous() or start + k.numel() > whole:
        return cache
    return replace(cache, v=torch.as_strided(k, k.shape, k.stride(), start))


def _from_the_start(cache: KVCache) -> KVCache:
    """Read K and V from the start of their memory where they are two tensors of a KVPool."""
    found = [one.as_strided(one.shape, one.stride(), one.storage_offset() % one.numel()) for one in (cache.k, cache.v)]
    same = cache.k.untyped_storage().data_ptr() == cache.v.untyped_storage().data_ptr()
    return replace(cache, k=found[0], v=cache.v if same else found[1])


def _by_storage(backend: Any) -> None:
    """Keep the views of the first layer for each memory that a forward's caches lie in."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def known(cache: KVCache) -> KVCache:
        k, v = kept.setdefault(cache.k.untyped_storage().data_ptr(), (cache.k, cache.v))
        return replace(cache, k=k, v=v)

    around(backend, "write_metadata", lambda original, batch: (kept.clear(), original(batch))[1])
    _on_cache(known)(backend)


def _wrapped(backend: Any) -> None:
    """Wrap page · stride at 2**31 if a page of all layers is contiguous; other pools are right."""

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        stride = cache.k.stride(0)
        if stride > cache.k[0].numel() * 2:
            offset = (batch.page_table.long() * stride).to(torch.int32)
            batch = replace(batch, page_table=offset.clamp(min=0) // stride)
        original(q, cache, batch, out)

    around(backend, "attend", attend)


class _Flattened(Backend):
    """Writes to the pool's memory from its first element, without the layer's offset."""

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Store the rows in the first layer of the memory."""
        first = cache.k.as_strided(cache.k.shape, cache.k.stride(), 0)
        super().write_kv(k, v, replace(cache, k=first), batch)


class _FlattenedPlugin(Plugin):
    def open_backend(self, geometry: Geometry, arena: Any) -> Backend:
        return _Flattened(geometry, arena)


def _moved_below(layers: int) -> Callable[..., None]:
    return _restored(lambda geometry: (slice(layers, None),))


MUTANTS = (
    Mutant("G01", "Finds V one layer's K after K", "one tensor [2, pages, …] a layer", patch=_on_cache(_v_after_k)),
    Mutant("G02", "Drops the layer's offset in the memory of K", "a kernel that takes the storage's address",
           patch=_on_cache(_from_the_start)),
    Mutant("G03", "Keeps the first layer's views of each memory", "a TMA descriptor by storage address",
           patch=_by_storage),
    Mutant("G04", "Wraps page offsets at 2**31 in a pool with all layers of a page adjacent", "vllm#47671",
           patch=_wrapped, **IN_PLACE),
    Mutant("G05", "Moves only the first 64 layers in compact", "a grid that is too small",
           hooks=compacting(_moved_below(64)), **TREES),
    Mutant("G06", "Stores rows in the first layer of the memory", "a kernel that takes the storage's address",
           layouts=("tutorial",), absent="a subclass of the tutorial's backend", plugin=_FlattenedPlugin),
)  # fmt: skip

KILLER = {
    "G01": "numerics.match_float64",
    "G02": "numerics.match_float64",
    "G03": "layers.have_their_own_caches",
    "G04": "pools.may_be_packed_and_far",
    "G05": "tree_ops.every_layer_of_a_large_model_is_moved",
    "G06": "numerics.match_float64",
}
"""Check that must kill each mutant."""
