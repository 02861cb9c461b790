"""KV pools of several layers, as engines allocate them: a layer's cache is a view with a storage offset."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

LAYERS = 3
SPARSE = 2**28
"""Number of elements of a layer from which it is not filled. Only the slots that a forward uses are then written."""


class Pool:
    """Holds the KV of several layers in one memory. Layers that no cache uses contain NaN and must not change.

    Args:
        parts: ``[layers, num_pages, P, kv_heads, width]`` each, views of any strides: K and V, or latent rows.
        draw: any value, from which the place of each of the model's layers in the pool is drawn.
    """

    def __init__(self, parts: Sequence[torch.Tensor], draw: object = 0) -> None:
        self._parts, self._taken, self._layers = parts, set[int](), len(parts[0])
        self._places = random.Random(f"layer {draw}").sample(range(self._layers), self._layers)
        self._is_sparse = parts[0][0].numel() >= SPARSE
        if not self._is_sparse:
            for part in parts:
                raw(part).fill_(-1)  # All bits set is NaN in every floating-point dtype.

    def take(self, layer: int) -> list[torch.Tensor]:
        """Return each part ``[num_pages, P, kv_heads, width]`` of a model's layer, which may change from now on."""
        at = self._places[layer % self._layers]
        self._taken.add(at)
        return [part[at] for part in self._parts]

    def changed(self) -> list[int]:
        """Return the places of layers that no cache uses and that have changed; [] for a pool that is not filled."""
        others = [] if self._is_sparse else sorted(set(range(self._layers)) - self._taken)
        return [layer for layer in others if any(bool((words(part[layer])[0] != -1).any()) for part in self._parts)]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of the tensor's memory as integers. NaN then equals itself, and every dtype can be indexed."""
    return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])


def words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views of the tensors' memory as 64-bit integers if all their rows consist of them, else as `raw` does.

    Comparing large pools takes a fraction of the time.
    """
    whole = all(
        one.stride(-1) == 1
        and not any(n * one.element_size() % 8 for n in (one.storage_offset(), one.shape[-1], *one.stride()[:-1]))
        for one in tensors
    )
    return tuple(one.view(torch.int64) if whole else raw(one) for one in tensors)


def at_slots(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return a copy of K or V ``[pages, P, kv_heads, head_dim]`` at some KV slots, ``[slots, kv_heads, head_dim]``."""
    slots = slots.to(pool.device)
    return raw(pool)[slots // pool.shape[1], slots % pool.shape[1]].view(pool.dtype)
