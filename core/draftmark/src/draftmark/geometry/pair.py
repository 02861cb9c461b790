"""Geometries of a target and a draft model, checked against each other. Integers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import GeometryError
from .batch_geometry import BatchGeometry
from .geometry import Geometry


@dataclass(frozen=True)
class GeometryPair:
    """Geometries of a target and a draft model that decode together.

    Both share the draft shape (the width of a tree or block), the limits, page ids, page table and lengths. Each has
    its own attention shape, arena, cache and backend.

    Attributes:
        target, draft: the two geometries, each made from its own model's configuration.

    Raises:
        GeometryError: the first field with different values in target and draft, such as the page size
            (vllm-ascend#13372).
    """

    target: Geometry
    draft: Geometry

    def __post_init__(self) -> None:
        for side in ("target", "draft"):
            if not isinstance(getattr(self, side), Geometry):
                limit, remedy = "it must be an instance of Geometry", "write Geometry.create(…)"
                raise GeometryError(f"pair.{side}", getattr(self, side), limit, remedy)
        for name in ("draft", "limits"):
            mine, other = getattr(self.target, name), getattr(self.draft, name)
            if mine != other:
                raise GeometryError(
                    f"pair.{name}", other, f"the target has {mine!r}", "give both geometries the same value"
                )
        pages = self.target.attention.page_size, self.draft.attention.page_size
        if pages[0] != pages[1]:
            raise GeometryError(
                "pair.page_size", pages[1], f"the target has {pages[0]}", "use one page size: both share a page table"
            )


def check_shared_batch(geometry: BatchGeometry, state: BatchGeometry) -> None:
    """Raise `GeometryError` unless two layers of one model have the same draft shape and limits, so share a batch."""
    for name in ("draft", "limits"):
        mine, other = getattr(geometry, name), getattr(state, name)
        for field in (one.name for one in fields(mine)):
            value, said = getattr(other, field), getattr(mine, field)
            if value != said:
                remedy = "give all geometries of a model the same value: they share a batch"
                raise GeometryError(f"state.{name}.{field}", value, f"the other layers have {said!r}", remedy)
