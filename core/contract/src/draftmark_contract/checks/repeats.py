"""Checks that a forward always gives the same bits, whatever ran before and wherever its memory lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.graphs import GraphKey, Program

from ..behaviour import Fixture, behaviour
from ..cases.contents import Contents
from ..cases.forward_sets import programs, representative_forwards
from ..cases.forwards import ForwardCase
from ..cases.geometries import shapes
from ..cases.graph_rounds import LARGE, program_cases, replays
from ..cases.production import crowd, crowds
from ..check import Case, ContractViolation, Wrong

if TYPE_CHECKING:
    import torch

    from ..harness.graph_harness import GraphHarness
    from ..harness.harness import Harness

SINCE = (1, 3)
ALSO = ("all-modes", "all-few-graphs", "all-kv8")
"""Shapes that these checks run in addition to the shapes that every check runs."""
CROWDS = ("crowd", "crowd-page128", "crowd-bf16")
"""Such shapes of batches with many long requests: each dtype, and pages of 64 and 128 tokens."""


def _forwards() -> list[Case]:
    found = [shape.case(representative_forwards(shape.geometry)) for shape in shapes(*ALSO)]
    for shape in crowds():
        if shape.name not in CROWDS:
            continue
        last = dict(programs(shape.geometry))
        found += [shape.case([crowd(shape.geometry, mode, step)], mode.value) for mode, step in last.items()]
    return found


@behaviour(Fixture.FORWARDS, cases=_forwards, since=SINCE, bugs=("sglang#10278",))
def give_the_same_bits(harness: Harness, forwards: list[ForwardCase]) -> None:
    """A forward gives the same bits again after other forwards, and on another arena."""
    first = {forward.name: _bits(harness, forward) for forward in forwards}
    fresh = harness.fresh()
    for forward in reversed(forwards):
        for where, runner in (("again, after other forwards", harness), ("on other memory", fresh)):
            _same(forward, first[forward.name], _bits(runner, forward), where)


def _bits(harness: Harness, forward: ForwardCase) -> torch.Tensor:
    """Return the bits of the live output rows as integers, so that NaN can be compared too."""
    batch = harness.load(forward, contents=Contents.SPREAD)
    harness.poison()
    return harness.bits(harness.run(forward, batch)[: forward.live_rows])


def _programs() -> list[Case]:
    return program_cases(shapes("all-modes"), SINCE)


@behaviour(Fixture.PROGRAM, cases=_programs, since=SINCE, bugs=("sglang#10278",))
def replays_give_the_same_bits(graphs: GraphHarness, program: Program) -> None:
    """A replay gives the same bits again after replays of other batches."""
    geometry = graphs.harness.geometry
    key = GraphKey(program, geometry.limits.capture_batch_sizes[-1])
    graphs.capture(key)
    rounds = [forward for _, forward in replays(geometry, program) if len(forward.requests) == key.batch_size]
    first = {forward.name: _replayed(graphs, key, forward) for forward in rounds[: len(LARGE)]}
    for forward in reversed(rounds[: len(LARGE)]):
        _same(forward, first[forward.name], _replayed(graphs, key, forward), "replayed again, after other rounds")


def _replayed(graphs: GraphHarness, key: GraphKey, forward: ForwardCase) -> torch.Tensor:
    loaded = graphs.load(forward, seed=3)
    graphs.plan(loaded)
    graphs.replay(key, loaded)
    graphs.interpret(loaded, graphs.copies[key])
    last = loaded.forwards[-1]
    return graphs.harness.bits(graphs.step_tensors[last.step].rows(last)[3][: last.live_rows])


def _same(forward: ForwardCase, one: torch.Tensor, other: torch.Tensor, where: str) -> None:
    differ = (one != other).flatten(1).any(1).nonzero().flatten().tolist()
    if differ:
        raise ContractViolation(
            f"a forward gives other bits when it runs {where}",
            batch=forward,
            got=f"other outputs in (request, row) {[forward.rows[n] for n in differ[:8]]}",
            expected="the same bits for one device, one batch and equal host lengths",
            formula="docs/contract.md, what may differ",
            bug="sglang#10278",
            remedy="sum in a fixed order: use no floating-point atomics, and choose nothing by load or by address",
            wrong=Wrong("output", [forward.rows[n] for n in differ]),
        )
