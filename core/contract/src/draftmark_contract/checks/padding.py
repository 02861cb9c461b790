"""Checks of padded requests: they name null pages, write finite rows, and change no live byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.forward_sets import programs
from ..cases.forwards import ForwardCase, ragged, uniform
from ..cases.geometries import shapes
from ..check import Case, ContractViolation
from ..oracle.formulas import max_requests

if TYPE_CHECKING:
    from ..harness.harness import Harness

ALSO = ("target-window", "draft-window", "draft-page1-words2", "all-no-graphs")
"""Shapes that these checks run in addition to the shapes that every check runs."""


def _cases() -> list[Case]:
    found = []
    for shape in shapes(*ALSO):
        geometry = shape.geometry
        size = geometry.attention.page_size
        largest = max_requests(geometry)
        for live in (0, 1, 3):
            lens = (size, 0, size + 2)[:live]
            for mode, step in programs(geometry):
                label = f"{mode.value}{step or ''}-{live}of{largest}"
                found.append(shape.case(uniform(label, geometry, mode, lens, largest, step=step, seed=live), label))
            if live:
                label = f"extend-{live}of{largest}"
                forward = ragged(label, geometry, lens, (3, 7, 1)[:live], padded=largest - live, seed=live)
                found.append(shape.case(forward, label))
    return found


@behaviour(
    Fixture.FORWARD,
    cases=_cases,
    bugs=("sglang#24743", "vllm#57094", "lmdeploy#4569", "vllm#19321", "sglang#1779"),
)
def changes_no_live_byte(harness: Harness, forward: ForwardCase) -> None:
    """In a batch with few live requests, padded rows touch only null pages and are finite, and live rows are right."""
    harness.assert_forward(forward, harness.load(forward))


@behaviour(Fixture.METADATA, cases=_cases, bugs=("vllm#38436", "sglang#25529"))
def is_declared(harness: Harness, forward: ForwardCase) -> None:
    """pad_fill and live_extent have allowed values, and a backend that declares unique_slots writes no slot twice.

    pad_fill is 0 or 1. live_extent is "live" or "padded".
    """
    spec = harness.spec(forward)
    declared = {"pad_fill": (spec.pad_fill, (0, 1)), "live_extent": (spec.live_extent, ("live", "padded"))}
    for field, (got, allowed) in declared.items():
        if got not in allowed:
            raise ContractViolation(f"MetadataSpec.{field} is out of range", got=got, expected=allowed)
    batch = harness.set(forward)
    harness.prepare(batch)
    writes = harness.decoded(forward, batch).writes
    unique = harness.subject.backend.requirements(forward.geometry).unique_slots
    if unique and writes and len(set(writes.values())) < len(writes):
        raise ContractViolation(
            "two rows write one KV slot, but the backend declares unique_slots",
            batch=forward,
            got=sorted(writes.values()),
            expected="every slot once",
        )
