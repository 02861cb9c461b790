"""Sizes that models and engines have; large ones where no interpreter runs."""

from __future__ import annotations

from dataclasses import replace

from ...cases import production
from ...cases.forwards import ragged
from ..driver import Bench
from ..item import Item
from ..step import step_of
from .asking import fitted, runs
from .numerics import of_each_mode

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
"""Shapes of each kind that an interpreter is asked about."""


def questions(bench: Bench) -> list[Item]:
    """Head shapes of models; crowds; a common prefix; mostly padding; many rows; all at once."""
    most = SLOW if bench.slow else None
    found = []
    for shape in production.heads()[:: 3 if bench.slow else 1]:
        geometry = fitted(bench, shape.geometry.attention)
        steps = [step_of(one, bench.trees) for one in of_each_mode(geometry, (140, 37))]
        found.append(runs(bench, HEADS, shape.name, steps))
    for shape in production.crowds()[:most]:
        geometry = fitted(bench, shape.geometry.attention, production.CROWD)
        for mode in geometry.modes:
            made = {CROWD: production.crowd, COMMON: production.common_prefix}
            for rule, make in made.items():
                step = step_of(make(geometry, mode, 0), bench.trees)
                found.append(runs(bench, rule, f"{shape.name}-{mode.value}", [step]))
            step = step_of(production.mostly_padding(geometry, mode, 0), bench.trees, surplus=64)
            found.append(runs(bench, PADDED, f"{shape.name}-{mode.value}", [step]))
    for shape in production.many_rows()[: 0 if bench.slow else None]:
        geometry = fitted(bench, shape.geometry.attention, shape.geometry.limits)
        found.append(
            runs(bench, ROWS, shape.name, [step_of(ragged("rows", geometry, [3 * n for n in range(10)], [53] * 10))])
        )
    for shape in production.full_size()[: 0 if bench.slow or bench.device == "cpu" else None]:
        geometry = fitted(bench, shape.geometry.attention, replace(shape.geometry.limits, capture_batch_sizes=(1, 8)))
        for mode in geometry.modes:
            found.append(
                runs(
                    bench,
                    FULL,
                    f"{shape.name}-{mode.value}",
                    [step_of(production.full(geometry, mode, 0), bench.trees)],
                )
            )
    return found
