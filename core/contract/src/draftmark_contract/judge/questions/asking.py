"""Makes geometries that a bench can be asked about, and items that run steps on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode

from ...cases.contents import Contents
from ..driver import Bench
from ..item import Item
from ..stage import Stage
from ..step import Step

LIMITS = Limits(max_num_reqs=6, max_context_len=300, max_extend_tokens=64, capture_batch_sizes=(1, 4, 8))
DRAFT = DraftShape(topk=1, num_steps=4, num_draft_tokens=5)
"""A chain of four drafts behind the pending token."""


def fitted(bench: Bench, attention: AttentionShape, limits: Limits = LIMITS, draft: DraftShape = DRAFT) -> Geometry:
    """The geometry with pages that the bench's backend serves, and the modes that its engine has."""
    modes = tuple(Mode(one) for one in bench.modes)
    return Geometry.create(bench.fit(attention), limits, draft if Mode.VERIFY in modes else DraftShape(), modes=modes)


def runs(
    bench: Bench,
    rule: str,
    case: str,
    steps: Sequence[Step],
    contents: Sequence[Contents] = (Contents.USUAL,),
    asks: str = "",
) -> Item:
    """An item that runs steps eagerly, one after another on one layer, each with each kind of contents."""

    def run() -> None:
        stage = Stage(bench, steps[0].geometry, max(step.forward.num_pages for step in steps))
        for number, step in enumerate(steps):
            for one in contents:
                what = f"with {one} contents the output" if len(contents) > 1 else "the output"
                stage.holds(step, contents=one, seed=number, what=what)

    return Item(rule, case, run, asks)


def on_stage(
    bench: Bench, rule: str, case: str, geometry: Geometry, pages: int, body: Callable[[Stage], None], asks: str = ""
) -> Item:
    """An item with a body of its own, on a layer of this geometry with so many pages."""
    return Item(rule, case, lambda: body(Stage(bench, geometry, pages)), asks)
