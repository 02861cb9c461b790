"""Layers with values of fewer elements than their keys, as in un-absorbed MLA prefill. Does not import torch."""

from __future__ import annotations

from draftmark.geometry import AttentionShape

from ..check import Case
from .geometries import Shape
from .latent import HALF, MODES, forwards_of, geometry_of

SINCE = (1, 5)
ATTENTIONS = {
    "mha-192-128": AttentionShape(4, 4, 192, 64, value_dim=128),
    "gqa4-192-128-page16": AttentionShape(8, 2, 192, 16, value_dim=128, **HALF),
    "gqa8-64-32-page128": AttentionShape(8, 1, 64, 128, value_dim=32),
}
"""Layers of models with 128 + 64 and 128 elements, and one of a smaller head."""


def each_mode() -> list[Case]:
    """Return the forwards of each set of modes."""
    return [
        Shape(name, geometry, SINCE).case(forwards_of(geometry), label)
        for name, attention in ATTENTIONS.items()
        for label, modes in MODES.items()
        for geometry in (geometry_of(attention, modes),)
    ]
