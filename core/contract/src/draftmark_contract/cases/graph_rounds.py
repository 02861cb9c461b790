"""Decode rounds for which CUDA graphs are captured and replayed. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from draftmark.geometry import BatchGeometry, Geometry, Mode
from draftmark.graphs import GraphKey, Program

from ..check import Case
from ..oracle.formulas import draft_steps
from .forwards import ForwardCase, device_rows, uniform
from .geometries import Shape

MODES = {
    Program.DECODE: Mode.DECODE,
    Program.VERIFY: Mode.VERIFY,
    Program.DRAFT_EXTEND: Mode.DRAFT_EXTEND,
    Program.DRAFT: Mode.DRAFT,
    Program.RAGGED_VERIFY: Mode.RAGGED_VERIFY,
    Program.DRAFT_BLOCK: Mode.DRAFT_BLOCK,
}


def programs_of(geometry: Geometry) -> list[Program]:
    """Return the graph programs (kinds of captured step) that a geometry's modes need."""
    found = [program for program, mode in MODES.items() if mode in geometry.modes]
    return [one for one in found if one is not Program.DRAFT or draft_steps(geometry)]


def key_of(forward: ForwardCase) -> GraphKey:
    """Return the key of the graph that replays a forward of any mode except EXTEND."""
    program = next(program for program, mode in MODES.items() if mode is forward.mode)
    return GraphKey(program, forward.budget or len(forward.requests))


def sizes_of(geometry: BatchGeometry, program: Program) -> tuple[int, ...]:
    """Return the sizes of a program's graphs: padded numbers of requests, or row budgets in RAGGED_VERIFY."""
    limits = geometry.limits
    return limits.row_budgets if program is Program.RAGGED_VERIFY else limits.capture_batch_sizes


def program_cases(shapes: Iterable[Shape], since: tuple[int, int] = (1, 0)) -> list[Case]:
    """Return one case (geometry, program) per graph program of each shape, dated by the later of both `since`."""
    return [
        Case(f"{shape.name}-{program.value}", (shape.geometry, program), max(since, shape.since))
        for shape in shapes
        for program in programs_of(shape.geometry)
    ]


def captured(geometry: Geometry, program: Program, size: int, short: bool = False) -> ForwardCase:
    """Return the batch on which a graph is captured: full and long, or one short request. DRAFT gives its last step."""
    live = 1 if short else min(size, geometry.limits.max_num_reqs)
    wall = geometry.limits.max_context_len
    lens = tuple(1 if short else wall - 3 * n for n in range(live))
    return _forward("capture", geometry, program, lens, size, 50)


WALL = (0, 3, 5, 7)
"""Indices of `replays`: the longest of each size, which a capture on one short request has not seen."""
SIZES = (0, 1, 3)
"""Indices of `replays`: the first of each size."""
LARGE = (0, 2, 7)
"""Indices of `replays`: three of the largest size: long and full, short and padded, long and padded."""


def replays(geometry: Geometry, program: Program) -> list[tuple[bool, ForwardCase]]:
    """Return (True to poison the arena first, batch) for sizes 8 → 4 → 8 → 1 → 8, with long and short requests."""
    wall, most = geometry.limits.max_context_len, geometry.limits.max_num_reqs
    sizes = sizes_of(geometry, program)
    small, mid, large = (*sizes, sizes[-1])[:3]
    page = geometry.attention.page_size
    plans = [
        (True, (wall,) * most, large),
        (False, (3, 0, page), mid),
        (False, (1, 2, 0), large),
        (True, (page + 1,), small),
        (True, tuple(min(page * n + n, wall) for n in range(most)), large),
        (False, (wall,), mid),
        (False, (), large),
        (False, (wall - 1, wall), large),
    ]
    made = []
    for number, (poison, lens, size) in enumerate(plans):
        tree = ("random", "unused", "star")[number % 3]
        made.append((poison, _forward(f"replay-{number}", geometry, program, lens[:size], size, number, tree)))
    return made


def _forward(
    name: str, geometry: Geometry, program: Program, lens: tuple[int, ...], size: int, seed: int, tree: str = "random"
) -> ForwardCase:
    if program is Program.RAGGED_VERIFY:
        rows, left = [], size
        for n in range(len(lens)):
            rows.append(min(left, (seed + 3 * n) % (geometry.draft.num_draft_tokens + 1)))
            left -= rows[-1]
        return device_rows(f"{program.value}-{name}", geometry, lens, rows, size, tree=tree, seed=seed)
    step = draft_steps(geometry) - 1 if program is Program.DRAFT else 0
    return uniform(f"{program.value}-{name}", geometry, MODES[program], lens, size, step=step, tree=tree, seed=seed)
