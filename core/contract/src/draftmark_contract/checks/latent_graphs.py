"""Checks of latent layers in graphs: replays of other rows and lengths than the capture's."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import Form

from ..behaviour import Fixture, behaviour
from ..cases import latent as cases
from ..cases.forwards import ForwardCase
from ..cases.geometries import Shape
from ..cases.graph_rounds import captured, key_of, programs_of, replays, sizes_of
from ..check import Case

if TYPE_CHECKING:
    from ..harness.harness import Harness

LIMITS = replace(cases.LIMITS, max_context_len=420, capture_batch_sizes=(1, 3, 6), row_budgets=(4, 16))
ALL, CHAINS = ("core", "ragged", "block"), ("plain", "ragged")
LAYERS = {
    "h16-page64": ((), ALL),
    "h20-256-page32": ((), CHAINS),
    "parts-h8-page128": (cases.PARTS, ("core",)),
    "h12-page16": ((Form.ENGINE_STORES, Form.ENGINE_TABLE), ALL),
}
"""Layers, their forms, and their sets of modes."""
REPLAYED = (0, 2, 3, 5)
"""Indices of `replays`: long and full, short and padded, of the smallest size, and one long request of the middle."""


def _rounds() -> list[Case]:
    """Return the batches of each program: those on which graphs are captured, largest first, then the replayed ones."""
    found = []
    for name, (forms, sets) in LAYERS.items():
        for label in sets:
            geometry = cases.geometry_of(cases.ATTENTIONS[name], cases.MODES[label], forms, LIMITS)
            for program in programs_of(geometry):
                sizes = sorted(sizes_of(geometry, program), reverse=True)
                first = [captured(geometry, program, size, short=size == sizes[0]) for size in sizes]
                every = replays(geometry, program)
                rounds = [*first, *(every[which][1] for which in REPLAYED)]
                found.append(Shape(name, geometry, cases.SINCE).case(rounds, program.value))
    return found


@behaviour(
    Fixture.FORWARDS,
    cases=_rounds,
    since=cases.SINCE,
    bugs=("vllm#51119", "sglang#7184", "TRT-LLM#12161", "vllm#34552", "sglang#12295"),
)
def replay_other_rows(harness: Harness, rounds: list[ForwardCase]) -> None:
    """Graphs captured from the largest size down are right for other lengths, rows and numbers of live requests.

    The largest graph is captured on one short request.
    """
    from ..harness.graph_harness import GraphHarness

    graphs = GraphHarness(harness)
    for number, forward in enumerate(rounds):
        key = key_of(forward)
        if key not in graphs.forms:
            graphs.record(key, graphs.load(forward, host="unknown" if harness.bounded else "exact"))
        else:
            graphs.assert_replay(key.program, graphs.load_replay(forward, number, poison=number % 2 == 0))
