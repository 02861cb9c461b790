"""Checks of recurrent state in graphs: a replay follows the slots, paths and checkpoints of its own round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from draftmark.graphs import GraphKey

from ..behaviour import Fixture, behaviour
from ..cases import state_graphs as cases
from ..cases.graph_rounds import key_of, sizes_of
from ..cases.state import SINCE

if TYPE_CHECKING:
    from ..cases.state_rounds import Round
    from ..harness.graph_harness import GraphHarness
    from ..harness.state_harness import StateHarness

BUGS = ("vllm#49918", "vllm#49757", "sglang#31099", "vllm#42430")


@behaviour(Fixture.ROUNDS, cases=cases.replayed, since=SINCE, bugs=BUGS)
def replays_follow_their_slots(harness: StateHarness, rounds: Sequence[Round]) -> None:
    """Replays are right when slots, lengths, trees and accepted paths change, and requests join, leave and swap slots.

    The largest graph is captured on one short request.
    """
    replay_rounds(captured(harness, rounds), rounds)


@behaviour(Fixture.ROUNDS, cases=cases.mixed, since=SINCE, bugs=BUGS)
def commits_may_follow_a_replay(harness: StateHarness, rounds: Sequence[Round]) -> None:
    """A commit may run outside of the graph of its rows, and graphs of several programs and prompts may alternate."""
    harness.captures_commit = False
    replay_rounds(captured(harness, rounds), rounds)


def captured(harness: StateHarness, rounds: Sequence[Round]) -> GraphHarness:
    """Capture every size of each program of the rounds, from the largest down."""
    from ..harness.graph_harness import GraphHarness

    graphs = GraphHarness(harness)
    for program in dict.fromkeys(one.program for one in rounds if one.program):
        for number, size in enumerate(sorted(sizes_of(harness.geometry, program), reverse=True)):
            _capture(graphs, GraphKey(program, size), short=number == 0)
    return graphs


def _capture(graphs: GraphHarness, key: GraphKey, short: bool) -> None:
    """Capture a graph on a round of its own, and leave the slots as they were."""
    harness: Any = graphs.harness
    kept = [one.clone() for one in harness.tensors.memory]
    first = cases.captured(harness.geometry, key.program, key.batch_size, short)
    graphs.record(key, graphs.load(first.forward))
    for one, before in zip(harness.tensors.memory, kept, strict=True):
        one.copy_(before)


def replay_rounds(graphs: GraphHarness, rounds: Sequence[Round]) -> None:
    """Run the rounds of a sequence, and check each. Graphs that are missing are captured when they are needed."""
    harness: Any = graphs.harness
    harness.start()
    for number, one in enumerate(rounds):
        if one.program is None:
            harness.assert_round(one, number, f"the output of round {number + 1}")
            continue
        key = key_of(one.forward)
        if key not in graphs.copies:
            _capture(graphs, key, short=number % 2 == 1)
        harness.copy(one)
        if number % 3 == 0:
            harness.arena.poison()
        loaded = graphs.load(one.forward, number, follows=True)
        graphs.plan(loaded)
        graphs.replay(key, loaded)
        if not harness.captures_commit:
            harness.commit(one.forward, loaded.batches[0])
        graphs.assert_round(loaded, graphs.copies[key], f"the replay of {key} in round {number + 1}")
