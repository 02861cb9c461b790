"""What a launch of `hopper` tells its kernel of the KV cache: descriptors of boxes, or pointers to gather keys by."""

from __future__ import annotations

from typing import Any

import torch

from . import boxes
from .tiling import Tile

FOLD_REGISTERS = 224
"""Registers of a thread of a folding warp group, of two beside four gathering warps; those have 56."""


def sources(k: torch.Tensor, v: torch.Tensor, page_size: int, tile: Tile) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """K and V as the tile's kernel takes them, and the numbers that say where their pages are.

    Args:
        k, v: ``[pages, P, KV heads, head_dim]``, which `boxes.describable` has found good for either way.
    """
    if tile.gather:
        return (k, v), (*pitches(k), *pitches(v))
    (k_box, k_other), (v_box, v_other) = (boxes.describe(one, page_size, tile) for one in (k, v))
    return (k_box, v_box, k_other, v_other), (k.shape[0],)


def pitches(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides of pages, slots and heads in bytes."""
    return tuple(stride * tensor.element_size() for stride in tensor.stride()[:3])


def options(tile: Tile, k: torch.Tensor, q: torch.Tensor, page_size: int) -> dict[str, Any]:
    """Constants and compiler options of the tile's kernel; see `boxes.options`."""
    chosen = boxes.options(tile, k, q)
    if not tile.gather:
        return chosen | {"BOX": boxes.SWIZZLED_ROWS if tile.whole else boxes.box(page_size, tile)}
    del chosen["WIDEN"], chosen["DEPTH"]
    return chosen | {"REGISTERS": FOLD_REGISTERS}
