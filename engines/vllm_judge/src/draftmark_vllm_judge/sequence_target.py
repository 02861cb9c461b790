"""Lets the judge test a backend that keeps KV by sequences in a memory of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

from draftmark import Geometry, Mode
from draftmark_contract.cases.forwards import ForwardCase, uniform
from draftmark_contract.check import Unjudged
from draftmark_contract.judge.driver import EngineCapabilities
from draftmark_contract.judge.harness import EngineHarness
from draftmark_contract.judge.questions import graphs, questions
from draftmark_contract.judge.questions.building import SMALL, fitted, on_layer
from draftmark_contract.judge.questions.steps import PURE
from draftmark_contract.judge.step import step_of
from draftmark_contract.runner.item import Item, item_of

from .sequence_driver import SequenceDriver
from .target import LEFT_OUT, VllmTarget

OWN_MEMORY = "the backend keeps KV in its own memory, which the judge cannot read"
ROUNDS = "history.equals_a_fresh_state"
KEPT = {"all-accepted": ((5, 5, 5),), "rejected": ((1, 3, 5), (2, 1, 4)), "all-rejected": ((1, 1, 1), (1, 1, 1))}
"""Accepted rows of each request after each verify, the pending token included."""
AS_ROUNDS = "a sequence runs on: after each verify the scheduler takes rejected rows back, and the next step is right"
ROOM = 12
"""Tokens for which the requests have pages beyond the first step's prefix."""


class SequenceTarget(VllmTarget):
    """Describes one backend with a `SequenceMemory` to the judge."""

    def __init__(self, name: str, memory: Any, device: str) -> None:
        super().__init__(name, memory.backend, device)
        self.memory = memory

    @property
    def left_out(self) -> Mapping[str, str]:
        """Rules without an item; rules about slots and stored KV need vLLM's pages."""
        return {
            **LEFT_OUT,
            "purity.metadata_serves_every_layer": OWN_MEMORY,
            "graphs": "graphs need vLLM's block table",
        }

    def open(self, geometry: Geometry, num_pages: int) -> Any:
        """Return a driver that runs this backend on layers of a geometry."""
        return SequenceDriver(self.memory, geometry, num_pages, self.device)

    def items(self) -> Sequence[Item]:
        """Return the items common to all engines that need no slots, and rounds of verifies."""
        caps = self.caps()
        captured = {one.id for one in graphs.questions(caps)}
        common = [one for one in questions(caps) if one.id not in captured]
        return [*(_unread(one) if one.rule == PURE else one for one in common), *_rounds(caps)]


def _unread(item: Item) -> Item:
    def run() -> None:
        raise Unjudged(OWN_MEMORY)

    return item_of(item.rule, item.case.id, run, item.asks)


def _rounds(caps: EngineCapabilities) -> list[Item]:
    found = []
    for name, shape in {"small": SMALL, "window": replace(SMALL, window_left=19)}.items():
        geometry = fitted(caps, shape)
        for mode, rounds in ((Mode.DECODE, {"decodes": ((1, 1, 1),) * 4}), (Mode.VERIFY, KEPT)):
            first = _first(geometry, mode)
            for case, kept in rounds.items():
                body = partial(_run, first=first, rounds=kept)
                found.append(on_layer(caps, ROUNDS, f"{name}-{case}", geometry, first.num_pages, body, AS_ROUNDS))
    return found


def _first(geometry: Geometry, mode: Mode) -> ForwardCase:
    """Return the first step. Its requests have pages for `ROOM` more tokens."""
    made = uniform(mode.value, geometry, mode, (40 + ROOM, 1 + ROOM, 133 + ROOM), 3, tree="chain")
    return replace(made, requests=tuple(replace(one, prefix=one.prefix - ROOM) for one in made.requests))


def _run(harness: EngineHarness, first: ForwardCase, rounds: Sequence[Sequence[int]]) -> None:
    driver = cast(SequenceDriver, harness.driver)
    harness.assert_forward(step_of(first), harness.load(step_of(first)))
    forward = first
    for number, kept in enumerate(rounds, 1):
        moved = tuple(replace(one, prefix=one.prefix + n) for one, n in zip(forward.requests, kept, strict=True))
        forward = replace(forward, name=f"{first.name}, step {number}: accepted {tuple(kept)}", requests=moved)
        harness.tensors.fill_rows(forward, number, 1.0)
        harness.assert_forward(step_of(forward), step_of(forward), run=driver.proceed)
