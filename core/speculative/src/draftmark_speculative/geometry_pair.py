"""Check that a target and a draft model can decode together. Integers only, no torch."""

from __future__ import annotations

from draftmark import Geometry, GeometryError


def check_pair(target: Geometry, draft: Geometry) -> None:
    """Check the geometries of a target and a draft model, each made from its own model's configuration.

    Both share the draft shape (the width of a tree or block), the limits, page ids, page table and lengths. Each has
    its own attention shape, arena, cache and backend.

    Raises:
        GeometryError: the first field with different values in target and draft, such as the page size
            (vllm-ascend#13372).
    """
    for name in ("draft", "limits"):
        mine, other = getattr(target, name), getattr(draft, name)
        if mine != other:
            raise GeometryError(
                f"pair.{name}", other, f"the target has {mine!r}", "give both geometries the same value"
            )
    pages = target.attention.page_size, draft.attention.page_size
    if pages[0] != pages[1]:
        raise GeometryError(
            "pair.page_size", pages[1], f"the target has {pages[0]}", "use one page size: both share a page table"
        )
