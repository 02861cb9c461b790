"""What was worked out of an object, as long as the object lives: a forward asks it of the same ones in every layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

import torch

from draftmark.runtime import KVCache

T = TypeVar("T")
R = TypeVar("R")


class Remembered(Generic[T, R]):
    """What a function says of objects that do not change, by their identity; it keeps none of them alive."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[ref[T], R]] = {}

    def __call__(self, function: Callable[[T], R], one: T) -> R:
        """What ``function(one)`` is, or was the first time. It must not hold `one`."""
        found = self._known.get(id(one))
        if found is None:
            number, known = id(one), self._known
            # The identity of an object that is gone may be another's.
            found = known[number] = ref(one, lambda _: known.pop(number, None)), function(one)
        return found[1]


class Layout:
    """All that launches take from a layer's cache but its addresses. Of two caches that are alike it is the same."""


def layout_of(cache: torch.Tensor) -> tuple[object, ...]:
    """All that launches take from K or V but its address."""
    return cache.stride(), cache.shape, cache.dtype, cache.is_cuda


def cache_layout(cache: KVCache) -> Layout:
    """The layout of a layer's cache, which is compared by identity."""
    return _REMEMBERED(_layout, cache)


def _layout(cache: KVCache) -> Layout:
    return _LAYOUTS.setdefault((layout_of(cache.k), layout_of(cache.v)), Layout())


_LAYOUTS: dict[tuple[object, ...], Layout] = {}
_REMEMBERED = Remembered[KVCache, Layout]()
