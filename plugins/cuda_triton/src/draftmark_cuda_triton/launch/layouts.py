"""Cache of facts by object identity, and the layout of a layer's KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

import torch

from draftmark import Geometry
from draftmark.runtime import KVCache, sinks_of

T = TypeVar("T")
R = TypeVar("R")


class IdentityCache(Generic[T, R]):
    """What a function says of objects that do not change, by their identity; it keeps none of them alive.

    Args:
        function: what it says of an object must not hold that.
    """

    def __init__(self, function: Callable[[T], R]) -> None:
        self._function = function
        self._cache: dict[int, tuple[ref[T], R]] = {}

    def __call__(self, one: T) -> R:
        """What the function says of an object, or said the first time."""
        found = self._cache.get(id(one))
        if found is None:
            number, cache = id(one), self._cache
            # The identity of an object that is gone may be another's.
            found = cache[number] = ref(one, lambda _: cache.pop(number, None)), self._function(one)
        return found[1]


class Layout:
    """All that launches take from a layer's cache but its addresses. Of two caches that are alike it is the same."""


def kv_layout(
    k: torch.Tensor, v: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> tuple[object, ...]:
    """All that launches take from K and V and their scales but addresses."""
    facts = [(one.stride(), one.shape, one.dtype, one.is_cuda) for one in (k, v)]
    return *facts, k_scale is None, v_scale is None


def layout_of_cache(cache: KVCache) -> Layout:
    """The layout of a layer's cache, which is compared by identity."""
    return interned_layout(cache.k, cache.v, cache)


def interned_layout(k: torch.Tensor, v: torch.Tensor, cache: KVCache) -> Layout:
    """The layout of K and V, and of a cache's scales and sinks."""
    facts = (*kv_layout(k, v, cache.k_scale, cache.v_scale), cache.sinks is None)
    return _LAYOUTS.setdefault(facts, Layout())


_LAYOUTS: dict[tuple[object, ...], Layout] = {}
cached_layout = IdentityCache(layout_of_cache)
"""`layout_of_cache`, worked out once for each cache."""


def layer_facts(geometry: Geometry) -> IdentityCache[KVCache, tuple[Layout, torch.Tensor | None]]:
    """Of each cache of a geometry's layers its layout, and the sinks that its attention counts."""
    return IdentityCache(lambda cache: (cached_layout(cache), sinks_of(cache, geometry)))
