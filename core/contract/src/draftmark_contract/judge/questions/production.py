"""Items with the sizes of real models and engines. The largest are skipped if an interpreter runs the kernels."""

from __future__ import annotations

from dataclasses import replace

from ...cases import production
from ...cases.forwards import ragged
from ...runner.item import Item
from ..devices import device_of
from ..driver import EngineCapabilities
from ..step import step_of
from .building import case_of, fitted, of_each_mode

HEADS, CROWD, COMMON = (
    "production.every_head_shape_is_right",
    "production.a_crowd_is_right",
    "production.a_common_prefix_is_right",
)
PADDED, ROWS, FULL = (
    "production.padding_may_be_most",
    "production.many_rows_are_right",
    "production.full_size_is_right",
)
SLOW = 2
"""Number of shapes of each kind that run in an interpreter."""


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return items for models' head shapes, many requests, a shared prefix, mostly padding, many rows, full size."""
    most = SLOW if caps.slow else None
    found = []
    for shape in production.heads()[:: 3 if caps.slow else 1]:
        geometry = fitted(caps, shape.geometry.attention)
        steps = [step_of(one, caps.trees) for one in of_each_mode(geometry, (140, 37))]
        found.append(case_of(caps, HEADS, shape.name, steps))
    for shape in production.crowds()[:most]:
        geometry = fitted(caps, shape.geometry.attention, production.CROWD)
        for mode in geometry.modes:
            made = {CROWD: production.crowd, COMMON: production.common_prefix}
            for rule, make in made.items():
                step = step_of(make(geometry, mode, 0), caps.trees)
                found.append(case_of(caps, rule, f"{shape.name}-{mode.value}", step))
            step = step_of(production.mostly_padding(geometry, mode, 0), caps.trees, surplus=64)
            found.append(case_of(caps, PADDED, f"{shape.name}-{mode.value}", step))
    for shape in production.many_rows()[: 0 if caps.slow else None]:
        geometry = fitted(caps, shape.geometry.attention, shape.geometry.limits)
        step = step_of(ragged("rows", geometry, [3 * n for n in range(10)], [53] * 10))
        found.append(case_of(caps, ROWS, shape.name, step))
    for shape in production.full_size()[: 0 if caps.slow or device_of(caps.device).host else None]:
        geometry = fitted(caps, shape.geometry.attention, replace(shape.geometry.limits, capture_batch_sizes=(1, 8)))
        for mode in geometry.modes:
            step = step_of(production.full(geometry, mode, 0), caps.trees)
            found.append(case_of(caps, FULL, f"{shape.name}-{mode.value}", step))
    return found
