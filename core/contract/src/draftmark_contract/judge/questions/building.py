"""Builds geometries that a backend supports, their forwards, and items of checks on an engine's layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode

from ...cases.forwards import ForwardCase, ragged, uniform
from ...check import Case, Check, all_checks
from ...runner.item import Item, item_of
from ..driver import EngineCapabilities
from ..harness import EngineHarness
from ..rules import name_of

LIMITS = Limits(max_num_reqs=6, max_context_len=300, max_extend_tokens=64, capture_batch_sizes=(1, 4, 8))
DRAFT = DraftShape(topk=1, num_steps=4, num_draft_tokens=5)
"""A chain of four draft tokens after the pending token."""
SMALL = AttentionShape(4, 2, 64, page_size=16, q_dtype="float32", kv_dtype="float32")
"""Float32 shape, so that one wrong key in a hundred is visible in the output."""


def fitted(
    caps: EngineCapabilities, attention: AttentionShape, limits: Limits = LIMITS, draft: DraftShape = DRAFT
) -> Geometry:
    """Return a geometry with these shapes, changed to a page size, dtypes and modes that the backend supports."""
    modes = tuple(Mode(one) for one in caps.modes)
    return Geometry.create(caps.fit(attention), limits, draft if Mode.VERIFY in modes else DraftShape(), modes=modes)


def of_each_mode(geometry: Geometry, lens: tuple[int, ...] = (0, 129, 250)) -> list[ForwardCase]:
    """Return forwards: decodes, verifies, a chunked prefill, and a step that mixes prefill, decodes and verifies."""
    found = []
    size = geometry.attention.page_size
    if Mode.DECODE in geometry.modes:
        found.append(uniform("decode", geometry, Mode.DECODE, lens, len(lens)))
    if Mode.VERIFY in geometry.modes:
        found.append(uniform("verify", geometry, Mode.VERIFY, lens, len(lens)))
    if Mode.EXTEND in geometry.modes:
        found.append(ragged("prefill", geometry, (0, 0), (min(size + 3, 50), 7), seed=1))
        found.append(ragged("chunk", geometry, (size + 1, size - 9, 3), (17, 33, 1), seed=2))
        found.append(ragged("mixed", geometry, (size, 131, 1, 0, 17), (1, 1, 5, 20, 5), seed=3))
    return found


@cache
def _checks() -> dict[str, Check]:
    return {name_of(check): check for check in reversed(all_checks())}


def case_of(subject: object, rule: str, case: str, value: Any, asks: str = "") -> Item:
    """Return an item that runs the rule's check on the backend.

    Args:
        subject: capabilities of the backend, with a method `harness`.
        case: name of the input.
        value: case value of the check; a `Step` may stand for a forward.
    """
    check = _checks()[rule]
    return item_of(rule, case, lambda: check.run(cast(Any, subject), Case(case, value)), asks)


def on_layer(
    caps: EngineCapabilities,
    rule: str,
    case: str,
    geometry: Geometry,
    pages: int,
    body: Callable[[EngineHarness], None],
    asks: str = "",
) -> Item:
    """Return an item with its own body, for a rule that a layer is tested by in another way than a plugin.

    Args:
        pages: KV pages of the layer.
        body: runs the layer of this geometry.
    """
    return item_of(rule, case, lambda: body(EngineHarness(caps, geometry, pages)), asks)
