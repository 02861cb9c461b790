"""Builds geometries that a backend supports, and items that run steps on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode

from ...cases.contents import Contents
from ...runner.item import Item, item_of
from ..driver import EngineCapabilities
from ..step import Step
from ..subject import EngineSubject

LIMITS = Limits(max_num_reqs=6, max_context_len=300, max_extend_tokens=64, capture_batch_sizes=(1, 4, 8))
DRAFT = DraftShape(topk=1, num_steps=4, num_draft_tokens=5)
"""A chain of four draft tokens after the pending token."""


def fitted(
    caps: EngineCapabilities, attention: AttentionShape, limits: Limits = LIMITS, draft: DraftShape = DRAFT
) -> Geometry:
    """Return a geometry with these shapes, changed to a page size, dtypes and modes that the backend supports."""
    modes = tuple(Mode(one) for one in caps.modes)
    return Geometry.create(caps.fit(attention), limits, draft if Mode.VERIFY in modes else DraftShape(), modes=modes)


def runs(
    caps: EngineCapabilities,
    rule: str,
    case: str,
    steps: Sequence[Step],
    contents: Sequence[Contents] = (Contents.USUAL,),
    asks: str = "",
) -> Item:
    """Return an item that runs steps eagerly on one layer, each step once with every kind of test values."""

    def run() -> None:
        subject = EngineSubject(caps, steps[0].geometry, max(step.forward.num_pages for step in steps))
        for number, step in enumerate(steps):
            for one in contents:
                what = f"with {one} contents the output" if len(contents) > 1 else "the output"
                subject.assert_step(step, contents=one, seed=number, what=what)

    return item_of(rule, case, run, asks)


def on_subject(
    caps: EngineCapabilities,
    rule: str,
    case: str,
    geometry: Geometry,
    pages: int,
    body: Callable[[EngineSubject], None],
    asks: str = "",
) -> Item:
    """Return an item that opens a layer of this geometry with `pages` KV pages and calls `body` on it."""
    return item_of(rule, case, lambda: body(EngineSubject(caps, geometry, pages)), asks)
