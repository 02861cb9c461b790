"""Sizes of production: what a kernel does at the third request of four says little of the thirtieth."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry, Mode
from draftmark.graphs import GraphKey, Program

from ..behaviour import Given, behaviour, on_device_only
from ..cases.contents import Contents
from ..cases.forward_sets import last_steps
from ..cases.forwards import ForwardCase, uniform
from ..cases.graph_rounds import MODES, program_cases
from ..cases.production import (
    CROWD,
    PREFIXES,
    columns,
    common_prefix,
    crowd,
    crowds,
    few_requests,
    full,
    full_size,
    heads,
    long_prefill,
    many_columns,
    many_rows,
    mostly_padding,
    rows,
    thousands_of_rows,
    wide,
    wide_crowd,
    wide_crowds,
    wide_tails,
)
from ..check import Case
from ..oracle.formulas import draft_steps

if TYPE_CHECKING:
    from ..harness.graph_harness import GraphHarness
    from ..harness.harness import Harness

SINCE = (1, 3)


def _heads() -> list[Case]:
    return [shape.case(few_requests(shape.geometry)) for shape in heads()]


@behaviour(Given.FORWARDS, cases=_heads, since=SINCE, bugs=("flashinfer#4316", "flashinfer#3563", "vllm#40792"))
def every_head_shape_is_right(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Head shapes of models and every group from 1 to 16, in every mode, at usual logits and at keys one by one."""
    for forward in forwards:
        _holds_with(harness, forward, Contents.USUAL, Contents.NEEDLES)


def _each_mode(make: Callable[[Geometry, Mode, int], ForwardCase]) -> Callable[[], list[Case]]:
    return lambda: [
        shape.case(make(shape.geometry, mode, step), mode.value)
        for shape in crowds()
        for mode, step in last_steps(shape.geometry).items()
    ]


@behaviour(
    Given.FORWARD, cases=_each_mode(crowd), since=SINCE, bugs=("llm-scaler#368", "sglang#28569", "TRT-LLM#16319")
)
def a_crowd_is_right(harness: Harness, forward: ForwardCase) -> None:
    """24 requests, more than any graph holds, and 2600 keys: all the same weight, usual ones, and keys one by one."""
    for contents in (Contents.FLAT, Contents.USUAL, Contents.NEEDLES):
        harness.arena.poison()
        harness.forward_holds(forward, harness.load(forward, contents=contents), f"with {contents} contents the output")


@behaviour(Given.FORWARD, cases=_each_mode(common_prefix), since=SINCE)
def a_common_prefix_is_right(harness: Harness, forward: ForwardCase) -> None:
    """Ten requests begin with the same pages: usual weights, and keys one by one."""
    _holds_with(harness, forward, Contents.USUAL, Contents.NEEDLES)


@behaviour(Given.FORWARD, cases=_each_mode(mostly_padding), since=SINCE, bugs=("sglang#24743", "vllm#57094"))
def padding_may_be_most(harness: Harness, forward: ForwardCase) -> None:
    """Two live requests of 24, one of them long."""
    harness.forward_holds(forward, harness.load(forward, contents=Contents.NEEDLES))


def _wide() -> list[Case]:
    few = [shape.case(forward, forward.name) for shape in wide_tails() for forward in wide(shape.geometry)]
    many = [shape.case(one, one.name) for shape in wide_crowds() for one in wide_crowd(shape.geometry)]
    return [*few, *many]


@behaviour(Given.FORWARD, cases=_wide, since=SINCE, bugs=("TRT-LLM#13006", "TRT-LLM#13081", "sglang#29450"))
def wide_tails_are_right(harness: Harness, forward: ForwardCase) -> None:
    """Tails of up to 130 slots, whose masks take five words a row; and a dozen requests with masks of two words."""
    _holds_with(harness, forward, Contents.USUAL, Contents.NEEDLES)


def _columns() -> list[Case]:
    return [shape.case(forward, forward.name) for shape in many_columns() for forward in columns(shape.geometry)]


@behaviour(Given.FORWARD, cases=_columns, since=SINCE)
def every_page_column_is_read(harness: Harness, forward: ForwardCase) -> None:
    """A request of thousands of pages of one token, or of hundreds of 16: all the same weight, and keys one by one."""
    _holds_with(harness, forward, Contents.FLAT, Contents.NEEDLES)


def _rows() -> list[Case]:
    wide_ones = [shape.case(forward, forward.mode.value) for shape in many_rows() for forward in rows(shape.geometry)]
    long_ones = [
        shape.case(one, one.mode.value) for shape in thousands_of_rows() for one in long_prefill(shape.geometry)
    ]
    return [*wide_ones, *long_ones]


@behaviour(Given.FORWARD, cases=_rows, since=SINCE)
def many_rows_are_right(harness: Harness, forward: ForwardCase) -> None:
    """More (row, head) pairs than a side of a launch grid may have, and more rows than half floats count."""
    harness.forward_holds(forward, harness.load(forward))


def _programs() -> list[Case]:
    return program_cases(shape for shape in crowds() if shape.name in ("crowd", "crowd-page128"))


@behaviour(
    Given.PROGRAM, cases=_programs, since=SINCE, bugs=("sglang#28569", "sglang#28767", "vllm#54418", "vllm#51119")
)
def large_graphs_and_larger_batches(graphs: GraphHarness, program: Program) -> None:
    """A graph of ten requests captured on a short one; replays with thousands of keys, an eager batch of 24 between."""
    harness, size = graphs.harness, CROWD.capture_batch_sizes[-1]
    geometry, mode = harness.geometry, MODES[program]
    step = draft_steps(geometry) - 1 if mode is Mode.DRAFT else 0
    graphs.capture(GraphKey(program, size), short=True)
    for number, lens in enumerate((PREFIXES[8:11], PREFIXES[:size], PREFIXES[8:11])):
        replayed = uniform(f"replay-{number}", geometry, mode, lens, size, step=step, tree="random", seed=number)
        graphs.replay_holds(program, graphs.load_replay(replayed, number, poison=True))
        eager = harness.place(crowd(geometry, mode, step))
        harness.forward_holds(eager, harness.load(eager, seed=number), "an eager forward above the largest graph")


def _full() -> list[Case]:
    return [
        shape.case(full(shape.geometry, mode, step), mode.value)
        for shape in full_size()
        for mode, step in last_steps(shape.geometry).items()
    ]


@on_device_only(Given.FORWARD, cases=_full, since=SINCE, bugs=("vllm#50065", "sglang#14173", "vllm#40383"))
def full_size_is_right_on_device(harness: Harness, forward: ForwardCase) -> None:
    """All at once: 33 requests of up to 8192 tokens, with the heads of models, in bfloat16."""
    _holds_with(harness, forward, Contents.FLAT, Contents.NEEDLES)


def _holds_with(harness: Harness, forward: ForwardCase, *contents: Contents) -> None:
    """The forward is right with each of these contents."""
    for one in contents:
        harness.forward_holds(forward, harness.load(forward, contents=one), f"with {one} contents the output")
