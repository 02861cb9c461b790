"""What a step finds in its buffers must not matter: sequences of forwards on one arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.geometry import Geometry, Mode

from ..check import Case
from ..scenarios.scenes import programs, spanning, telling
from ..scenarios.shapes import shapes
from ..scenarios.tiers import behaviour
from ..scenarios.turns import Turn, uniform

if TYPE_CHECKING:
    from ..subject import Subject

ALSO = ("target-window", "draft-window", "target-page1-words2", "target-page32-long")
"""Shapes beside those that every check takes."""


def _sequences() -> list[Case]:
    found = []
    for shape in shapes(*ALSO):
        for mode, step in programs(shape.geometry):
            label = f"{mode.value}{step or ''}"
            turns = _shrink_and_grow(f"{shape.name}-{label}", shape.geometry, mode, step)
            found.append(shape.case(turns, f"{label}-shrink-grow"))
        turns = telling(shape.geometry) if shape.brief else spanning(shape.geometry)
        found.append(shape.case(turns, "modes"))
        found.append(shape.case(turns[::-1], "modes-backwards"))
        found.append(shape.case(turns[::3] + turns[1::3] + turns[2::3], "modes-shuffled"))
    return found


def _shrink_and_grow(label: str, geometry: Geometry, mode: Mode, step: int) -> list[Turn]:
    """Short, then long, then few and short, then many again; trees change as well."""
    wall, most = geometry.limits.max_context_len, geometry.limits.max_num_reqs
    largest = geometry.limits.capture_batch_sizes[-1]
    plans = [
        ((2,) * most, largest, "random"),
        ((wall,) * most, largest, "random"),
        ((1, 3), 4, "unused"),
        ((0,), 1, "chain"),
        (tuple(range(most)), largest, "star"),
        ((wall - 1, 0, 2), largest, "chain"),
        ((5,), largest, "random"),
    ]
    return [
        uniform(f"{label}-{i}", geometry, mode, lens, padded, step=step, tree=tree, seed=i)
        for i, (lens, padded, tree) in enumerate(plans)
    ]


@behaviour(cases=_sequences, bugs=("sglang#10892", "vllm#36611", "flashinfer#1028", "sglang#31198", "vllm#41841"))
def equals_a_fresh_state(subject: Subject, turns: list[Turn]) -> None:
    """Growing, shrinking and changing mode, step and tree on dirty buffers is as good as a fresh arena."""
    from ..check import ContractViolation
    from ..scenarios import verify
    from ..scenarios.rig import Rig, place
    from .lengths import SUFFICIENT

    kinds = SUFFICIENT[subject.backend.host_lengths(turns[0].geometry)][::-1]
    pages = max(turn.num_pages for turn in turns)
    rig = Rig(subject, turns[0].geometry, pages)
    for number, turn in enumerate(place(rig, turn) for turn in turns):
        what, kind = f"the output after {number} other forwards", kinds[number // 2 % len(kinds)]
        verify.turn_holds(rig, turn, rig.load(turn, kind), what)  # outputs: float64 is a stricter judge than a rerun
        fresh = Rig(subject, turn.geometry, pages)
        batch = fresh.load(turn)
        fresh.prepare(batch)
        if rig.decoded(turn, rig.load(turn)) != fresh.decoded(turn, batch):
            raise ContractViolation(
                f"after {number} other forwards the metadata differ from a fresh state's",
                batch=turn,
                got="other slots",
                expected="the same slots of every row, padded ones included",
                bug="sglang#10892",
            )
