"""A cache keyed by object identity, checks of dtypes, and interned layouts of KV caches (equal ones are one object)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar
from weakref import ref

import torch

from draftmark import BatchError, Geometry
from draftmark.runtime import ForwardBatch, KVCache, Tree, sinks_of

T = TypeVar("T")
R = TypeVar("R")


class IdentityCache(Generic[T, R]):
    """Caches a function's results for immutable objects by object identity, without keeping the objects alive.

    Args:
        function: computes the result for an object. The result must not refer to the object.
    """

    def __init__(self, function: Callable[[T], R]) -> None:
        self._function = function
        self._cache: dict[int, tuple[ref[T], R]] = {}

    def __call__(self, one: T) -> R:
        """Return the function's result for an object, computed in the first call only."""
        found = self._cache.get(id(one))
        if found is None:
            number, cache = id(one), self._cache
            # Python can reuse the id of a deleted object, so the entry is dropped together with the object.
            found = cache[number] = ref(one, lambda _: cache.pop(number, None)), self._function(one)
        return found[1]


def check_dtypes(batch: ForwardBatch) -> None:
    """Raise BatchError unless the kernels can read the batch's tensors: recorded launches assume these dtypes."""
    lens, starts, table, slots, tail = batch.prefix_lens, batch.q_indptr, batch.page_table, batch.slots, batch.tail
    is_int32 = lens.dtype is starts.dtype is table.dtype is torch.int32
    if is_int32 and not isinstance(tail, Tree) and (slots is None or slots.dtype is torch.int64):
        return
    int32 = {"prefix_lens": lens, "q_indptr": starts, "page_table": table}
    if isinstance(tail, Tree):
        int32 |= {"tail.mask": tail.mask, "tail.depth": tail.depth}
    for name, tensor in int32.items():
        check_dtype(name, tensor, torch.int32)
    if slots is not None:
        check_dtype("slots", slots, torch.int64)


def check_dtype(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    """Raise BatchError unless a tensor has the dtype that the kernels read."""
    if tensor.dtype is not dtype:
        raise BatchError(f"{name} has dtype {tensor.dtype}, but the kernels read {dtype}; pass {name}.to({dtype})")


class Layout:
    """Properties of a layer's KV cache on which launches depend, except addresses. Equal layouts are one object."""


def kv_layout(
    k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[object, ...]:
    """Return all properties of K, V and their scales that launches depend on, except addresses."""
    facts = [(one.stride(), one.shape, one.dtype, one.is_cuda) for one in (k, v)]
    return *facts, k_scale is None, v_scale is None


class KvFacts(NamedTuple):
    """Holds what launches need of one layer's K and V.

    Attributes:
        layout: interned layout of the cache.
        k, v: K and V ``[pages, P, KV heads, elements]``; of a latent layer the value part and the rest of the rows.
    """

    layout: Layout
    k: torch.Tensor
    v: torch.Tensor


class LayerFacts(NamedTuple):
    """Holds what attention launches need of one layer's cache.

    Attributes:
        layout, k, v: as in `KvFacts`.
        sinks: attention sinks, or None.
    """

    layout: Layout
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None


def kv_operands(cache: KVCache, is_latent: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a cache as kernels take them; of latent rows the value part and the rest."""
    return latent_operands(*cache.part_pages) if is_latent else (cache.k, cache.v)


def latent_operands(value: torch.Tensor, rest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both parts of latent rows; rows without a rest have the value part twice, because kernels read no rest."""
    return value, rest if rest.shape[-1] else value


class Layouts:
    """Interns layouts: caches of equal layout have one `Layout`."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Layout] = {}

    def of(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache) -> Layout:
        """Return the layout of K and V together with the scales and sinks of a cache."""
        facts = (*kv_layout(k, v, cache.k_scale, cache.v_scale), cache.sinks is None)
        return self._known.setdefault(facts, Layout())


def kv_facts(geometry: Geometry) -> Callable[[KVCache], KvFacts]:
    """Return a function that gives a cache's `KvFacts`. It remembers layouts, and no tensor of a cache."""
    is_latent, layouts = geometry.attention.latent, Layouts()
    layout_of = IdentityCache[KVCache, Layout](lambda cache: layouts.of(*kv_operands(cache, is_latent), cache))
    return lambda cache: KvFacts(layout_of(cache), *kv_operands(cache, is_latent))


def layer_facts(geometry: Geometry) -> Callable[[KVCache], LayerFacts]:
    """Return a function that gives a cache's `LayerFacts`. It remembers layouts and sinks."""
    known = kv_facts(geometry)
    checked_sinks = IdentityCache[KVCache, torch.Tensor | None](lambda cache: sinks_of(cache, geometry))
    return lambda cache: LayerFacts(*known(cache), checked_sinks(cache))
