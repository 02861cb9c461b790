"""Forwards over the space of sizes: head dimension, heads, page, batch and length, drawn together. No torch.

Lists of sizes leave gaps: a kernel may be wrong at any length, batch or head dimension that no list names. These cases
draw all sizes log-uniformly, and let each two ranges of them meet in some case.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode

from ..check import Case
from ..profiles import MANDATORY, MODEL_HEAD_DIMS, MODEL_PAGES
from .drawn import Sizes, in_one_geometry
from .features import ODD_DIMS
from .forwards import ForwardCase, uniform
from .space import Point, covering, log_uniform

SINCE = (1, 5)
HEAD_DIM_RANGES = ((8, 63), (64, 127), (128, 255), (256, 576))
PAGE_RANGES = ((1, 15), (16, 63), (64, 128), (129, 1024))
CROWD = (13, 64)
AXES: dict[str, Sequence[Any]] = {
    "mode": tuple(Mode),
    "head_dim": HEAD_DIM_RANGES,
    "page": PAGE_RANGES,
    "group": ((1, 1), (2, 8), (9, 32)),
    "requests": ((1, 1), (2, 12), CROWD),
    "keys": ((1, 63), (64, 700), (701, 3000)),
    "dtype": ("bfloat16", "float16", "float32"),
}
LISTED_DIMS = (*MODEL_HEAD_DIMS, *ODD_DIMS, 32, 72, 120)
"""Head dimensions that engines list."""
WORK = 2**22
"""Most values of K if every request were as long as the longest one."""
SMALL = AttentionShape(2, 1, 64, 16, "float16", "float16")
LONGEST, AT_ONCE = 700, 50
"""Every number of keys up to here, this many requests at a time."""
STEP, MOST = 16, 1024
"""Multiples of `STEP` up to `MOST` contain several multiples of every tile size of kernels."""
ROW_MODES = (Mode.VERIFY, Mode.DRAFT_EXTEND, Mode.DRAFT_BLOCK)
EVERY_ROWS, MOST_ROWS, DRAWN = 64, 160, 10
"""Rows of a request up to which VERIFY has every number, most rows, and drawn numbers of each mode."""
ROWS = 300
"""Most rows of a forward with many requests."""
MANY_REQUESTS, MANY_KEYS = 256, 2**16 + 300
"""More requests than a byte counts, and more keys than 16 bits count."""


def drawn() -> list[Case]:
    """Return forwards of drawn sizes, in which each two ranges of sizes meet, and each listed head dimension occurs.

    Half of the head dimensions and pages are those of models, so that a backend of few shapes meets all other sizes.
    """
    first: list[Point] = [
        {"head_dim": (dim, dim), "mode": CORE_MODES[n % len(CORE_MODES)], "requests": CROWD}
        for n, dim in enumerate(LISTED_DIMS)
    ]
    points = covering(AXES, random.Random("sizes"), first)
    return [_case(point, number) for number, point in enumerate(points)]


def _case(values: dict[str, Any], number: int) -> Case:
    mode: Mode = values["mode"]
    name = f"{mode.value}-{number}".replace("_", "-")
    dice = random.Random(name)
    model = dice.randrange(2) == 0
    dim = _drawn(dice, values["head_dim"], MODEL_HEAD_DIMS if model else ())
    page = _drawn(dice, values["page"], MODEL_PAGES if model else ())
    keys, group = _drawn(dice, values["keys"]), _drawn(dice, values["group"])
    requests = min(_drawn(dice, values["requests"]), max(1, WORK // (max(keys, page) * dim)))
    heads = log_uniform(dice, 1, min(8, max(1, WORK // (requests * max(keys, page) * dim))))
    dtype = values["dtype"]
    attention = AttentionShape(group * heads, heads, dim, page, dtype, dtype)
    return Case(name, Sizes(attention, mode, requests, keys).draw(name), SINCE)


def _drawn(dice: random.Random, bounds: tuple[int, int], listed: Sequence[int] = ()) -> int:
    """Draw one of the listed values within the bounds, or any value within the bounds if none is listed there."""
    inside = [one for one in listed if bounds[0] <= one <= bounds[1]]
    return dice.choice(inside) if inside else log_uniform(dice, *bounds)


def every_length() -> list[Case]:
    """Return decode batches in the core's shape that together have each number of keys from 1 to 700 once."""
    totals = [range(first, min(first + AT_ONCE, LONGEST + 1)) for first in range(1, LONGEST + 1, AT_ONCE)]
    sizes = Sizes(MANDATORY, Mode.DECODE, AT_ONCE, LONGEST)
    return [Case("decode", in_one_geometry([sizes.with_lengths(f"from {some[0]}", some, 0) for some in totals]), SINCE)]


def multiples() -> list[Case]:
    """Return forwards of 64 requests in each mode. Their keys are the multiples of 16 to 1,024.

    In one forward they are so with the new tokens of this forward, and in the other without.
    """
    every, found = tuple(range(MOST, 0, -STEP)), []
    for mode in Mode:
        sizes, name = Sizes(SMALL, mode, len(every), MOST), mode.value.replace("_", "-")
        for label, committed in (("all", False), ("committed", True)):
            found.append(Case(f"{name}-{label}", sizes.with_lengths(name, every, 0, committed), SINCE))
    return found


def extremes() -> list[Case]:
    """Return 256 requests, and a request of over 65,536 keys, in each mode."""
    one_head, found = replace(SMALL, num_qo_heads=1), []
    for mode in Mode:
        name = mode.value.replace("_", "-")
        for label, sizes in (
            (f"requests{MANY_REQUESTS}", Sizes(one_head, mode, MANY_REQUESTS, 90)),
            (f"keys{MANY_KEYS}", Sizes(replace(one_head, page_size=128), mode, 2, MANY_KEYS)),
        ):
            found.append(Case(f"{label}-{name}", sizes.draw(f"{label}-{name}"), SINCE))
    return found


def row_counts() -> list[Case]:
    """Return forwards with each number of rows a request from 1 to 64 in VERIFY, and with drawn numbers in other modes.

    The number of requests is drawn too.
    """
    dice = random.Random("row counts")
    counts = {mode: [log_uniform(dice, 1, MOST_ROWS) for _ in range(DRAWN)] for mode in ROW_MODES}
    counts[Mode.VERIFY] = [*range(1, EVERY_ROWS + 1), *counts[Mode.VERIFY]]
    return [
        Case(mode.value.replace("_", "-"), tuple(_of_rows(mode, rows) for rows in some), SINCE)
        for mode, some in counts.items()
    ]


def _of_rows(mode: Mode, rows: int) -> ForwardCase:
    name = f"{mode.value}-rows{rows}"
    dice = random.Random(name)
    prefixes = [dice.randrange(24) for _ in range(log_uniform(dice, 3, max(3, ROWS // rows)))]
    block = mode is Mode.DRAFT_BLOCK
    limits = Limits(len(prefixes), max(rows, 24), 16, (1,))
    draft = DraftShape(2, 2, 2 if block else rows, block_size=rows if block else 0)
    geometry = Geometry.create(SMALL, limits, draft, modes=(mode,))
    tree = dice.choice(("chain", "random"))
    return uniform(name, geometry, mode, prefixes, len(prefixes), tree=tree if rows > 1 else "chain", seed=rows)
