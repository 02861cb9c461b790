"""Forwards that one opened backend runs again and again, in ever new lengths and layouts. Does not import torch."""

from __future__ import annotations

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode

from ..check import Case
from ..oracle.formulas import max_requests
from .forward_sets import last_steps
from .forwards import ForwardCase, ragged, uniform
from .geometries import behaviours

SINCE = (1, 5)
PLANS = 66_000
"""Number of plans in one life: more than a counter of 16 bits holds."""
NEW = 10_000
"""Number of plans in one life with lengths and layouts that no plan before had. Later plans repeat some of them."""
STEPS = 4_200
"""Number of whole steps in one life: more than 4,096. A step of an interpreter takes milliseconds."""


def forwards_of_all_sizes(geometry: Geometry) -> list[ForwardCase]:
    """Return one forward for each mode and each number of requests, with prefixes of more than two pages."""
    found = []
    length = 2 * geometry.attention.page_size + 5
    for size in range(1, max_requests(geometry) + 1):
        for mode, step in last_steps(geometry).items():
            if mode is not Mode.EXTEND:
                found.append(uniform(f"{mode.value}-{size}", geometry, mode, (length,), size, step=step))
            elif size <= geometry.limits.max_num_reqs:
                found.append(ragged(f"extend-{size}", geometry, (length,) * size, (3, *[2] * (size - 1))))
    return found


def lives_of_plans() -> list[Case]:
    """Return (number of plans, forwards): a full life of the core's modes, and a shorter one of all modes."""
    lives = {"small": PLANS, "all-modes": NEW}
    return [
        Case(f"plans{plans}-{name}", (plans, forwards_of_all_sizes(behaviours()[name])), SINCE)
        for name, plans in lives.items()
    ]


def lives_of_steps() -> list[Case]:
    """Return seven forwards of one request and one head, the smallest that a step can have.

    Seven is coprime to the powers of two, so every forward meets every position of a ring of buffers.
    """
    limits = Limits(max_num_reqs=2, max_context_len=60, max_extend_tokens=8, capture_batch_sizes=(1,))
    shape = AttentionShape(1, 1, 64, 16, "float16", "float16")
    geometry = Geometry.create(shape, limits, DraftShape(topk=2, num_steps=2, num_draft_tokens=3), modes=CORE_MODES)
    decodes = [uniform(f"decode-{n}", geometry, Mode.DECODE, (n,), 1, seed=n) for n in (5, 16, 0, 40)]
    last = last_steps(geometry)
    trees = [uniform(one.value, geometry, one, (17,), 1, step=last[one]) for one in (Mode.VERIFY, Mode.DRAFT)]
    return [Case(f"steps{STEPS}", [*decodes, *trees, ragged("extend", geometry, (3,), (3,))], SINCE)]
