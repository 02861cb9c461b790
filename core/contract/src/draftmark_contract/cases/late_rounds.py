"""Rounds (forwards) that the host queues on a device before the device has run any of them. Does not import torch.

Each round has its own pages, so that a value from another round names other KV slots. Lengths, sizes and trees change
from round to round. Every program first runs long and full batches, then few short requests, then a mix. Prefills with
other splits come between them.
"""

from __future__ import annotations

from functools import cache

from draftmark.geometry import Geometry, Mode

from ..oracle.formulas import draft_steps
from .forwards import ForwardCase, ragged, uniform
from .graph_rounds import MODES, programs_of


@cache
def in_flight(geometry: Geometry) -> tuple[ForwardCase, ...]:
    """Return the forwards in the order in which they are queued. A DRAFT round is given by its last step."""
    found: list[ForwardCase] = []
    for number, (name, lens, size, tree) in enumerate(_scenes(geometry)):
        for program in programs_of(geometry):
            step = draft_steps(geometry) - 1 if MODES[program] is Mode.DRAFT else 0
            label, mode, seed = f"late-{program.value}-{name}", MODES[program], len(found)
            found.append(
                uniform(label, geometry, mode, lens, size, step=step, tree=tree, seed=seed, first_page=_end(found))
            )
        if Mode.EXTEND in geometry.modes:
            found.append(_prefill(geometry, number, _end(found)))
    return tuple(found)


def _end(rounds: list[ForwardCase]) -> int:
    """Return the first page id that no round uses."""
    return rounds[-1].num_pages if rounds else 1


def _scenes(geometry: Geometry) -> list[tuple[str, tuple[int, ...], int, str]]:
    """Return groups of forwards as (name, prefix lengths, padded batch size, kind of tree)."""
    wall, most, page = geometry.limits.max_context_len, geometry.limits.max_num_reqs, geometry.attention.page_size
    sizes = geometry.limits.capture_batch_sizes or (most,)
    mid, large = sizes[-2:][0], sizes[-1]
    return [
        ("long", tuple(wall - 3 * n for n in range(min(most, large))), large, "random"),
        ("short", (2, 0, page)[:mid], mid, "star"),
        ("between", (wall // 2, page + 1, 1)[: min(most, large)], large, "deep"),
    ]


def _prefill(geometry: Geometry, number: int, first_page: int) -> ForwardCase:
    """Return a prefill with a fixed number of requests and rows, but a different split each time (vllm-ascend#5711)."""
    lens, rows = [((0, 5, 1), (9, 1, 3)), ((3, 0, 20), (1, 9, 3)), ((7, 11, 2), (3, 3, 7))][number]
    name = f"late-extend-{number}"
    return ragged(name, geometry, lens, rows, padded=1, seed=number, first_page=first_page)
