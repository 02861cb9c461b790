"""Checks at production sizes: many requests, long contexts and wide trees, which show faults that small cases miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry, Mode
from draftmark.graphs import GraphKey, Program

from ..behaviour import Fixture, behaviour, on_device_only
from ..cases import features
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
from ..check import Case, ContractViolation, Refused
from ..oracle.formulas import draft_steps
from ..sizing.batches import brief

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..cases.latent import Special
    from ..harness.graph_harness import GraphHarness
    from ..harness.harness import Harness

SINCE = (1, 3)


def _heads() -> list[Case]:
    return [shape.case(few_requests(shape.geometry)) for shape in heads()]


@behaviour(Fixture.FORWARDS, cases=_heads, since=SINCE, bugs=("flashinfer#4316", "flashinfer#3563", "vllm#40792"))
def every_head_shape_is_right(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Outputs are right for the head shapes of models and for every group from 1 to 16, in every mode.

    A group is the number of query heads per KV head.
    """
    for forward in forwards:
        assert_forward(harness, forward, Contents.USUAL, Contents.NEEDLES)


@behaviour(
    Fixture.FORWARD,
    cases=features.alone,
    since=SINCE,
    bugs=("llm-scaler#368", "sglang#28569", "TRT-LLM#16319", "flashinfer#3864"),
)
def a_crowd_is_right(harness: Harness, forward: ForwardCase) -> None:
    """A batch of 24 requests or more, the longest with over 2,048 keys, is right in every mode with each feature.

    Head shapes, groups, pages, trees and padding differ from item to item. Some requests share a common prefix.
    """
    assert_forward(harness, forward, Contents.WEIGHED)


@behaviour(Fixture.FORWARD, cases=features.prompts, since=features.SINCE)
def a_prompt_is_right(harness: Harness, forward: ForwardCase) -> None:
    """A prompt of more than 1,000 rows in one EXTEND is right next to shorter ones, with each feature."""
    assert_forward(harness, forward, Contents.WEIGHED)


@behaviour(Fixture.FORWARD, cases=features.modules, since=features.SINCE)
def several_modules_are_right(harness: Harness, forward: ForwardCase) -> None:
    """A DRAFT_EXTEND of several MTP modules is right for 24 requests, the longest with over 2,000 keys."""
    assert_forward(harness, forward, Contents.WEIGHED)


@behaviour(Fixture.FORWARD, cases=features.products, since=features.SINCE)
def profiles_are_right_together(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right for crowds with thousands of keys when several features meet; each two meet in some item."""
    assert_forward(harness, forward, Contents.WEIGHED)


def _each_mode(make: Callable[[Geometry, Mode, int], ForwardCase], *names: str) -> Callable[[], list[Case]]:
    return lambda: [
        shape.case(make(shape.geometry, mode, step), mode.value)
        for shape in crowds()
        for mode, step in last_steps(shape.geometry).items()
        if shape.name in names
    ]


@behaviour(Fixture.FORWARD, cases=_each_mode(common_prefix, "crowd-window", "crowd-page128"), since=SINCE)
def a_common_prefix_is_right(harness: Harness, forward: ForwardCase) -> None:
    """Ten requests that share the pages of a common prefix give right outputs."""
    assert_forward(harness, forward, Contents.USUAL, Contents.NEEDLES)


@behaviour(
    Fixture.FORWARD,
    cases=_each_mode(mostly_padding, "crowd", "crowd-page128"),
    since=SINCE,
    bugs=("sglang#24743", "vllm#57094"),
)
def padding_may_be_most(harness: Harness, forward: ForwardCase) -> None:
    """A batch of 24 requests is right when only two of them are live and one of the two is long."""
    harness.assert_forward(forward, harness.load(forward, contents=Contents.NEEDLES))


def _wide() -> list[Case]:
    few = [shape.case(forward, forward.name) for shape in wide_tails() for forward in wide(shape.geometry)]
    many = [shape.case(one, one.name) for shape in wide_crowds() for one in wide_crowd(shape.geometry)]
    return [*few, *many]


@behaviour(Fixture.FORWARD, cases=_wide, since=SINCE, bugs=("TRT-LLM#13006", "TRT-LLM#13081", "sglang#29450"))
def wide_tails_are_right(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right for tails of up to 130 slots, with masks of five words a row.

    A batch of a dozen requests with masks of two words a row is right too.
    """
    assert_forward(harness, forward, Contents.USUAL, Contents.NEEDLES)


def _columns() -> list[Case]:
    return [shape.case(forward, forward.name) for shape in many_columns() for forward in columns(shape.geometry)]


@behaviour(Fixture.FORWARD, cases=_columns, since=SINCE)
def every_page_column_is_read(harness: Harness, forward: ForwardCase) -> None:
    """A request attends to every column of its page table: thousands of one-token pages, or hundreds of pages of 16."""
    assert_forward(harness, forward, Contents.FLAT, Contents.NEEDLES)


def _rows() -> list[Case]:
    wide_ones = [
        shape.case(forward, forward.mode.value)
        for number, shape in enumerate(many_rows())
        for forward in rows(shape.geometry)[number:][:1]  # a prefill of one shape, and a VERIFY of the other
    ]
    long_ones = [
        shape.case(one, one.mode.value) for shape in thousands_of_rows() for one in long_prefill(shape.geometry)
    ]
    return [*wide_ones, *long_ones]


@behaviour(Fixture.FORWARD, cases=_rows, since=SINCE)
def many_rows_are_right(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right with more (row, head) pairs than one dimension of a launch grid allows.

    Another case has more rows than a half-precision float can count.
    """
    harness.assert_forward(forward, harness.load(forward))


def _programs() -> list[Case]:
    """Return every program of a crowd, and those of a target on pages of 128."""
    cases = program_cases(shape for shape in crowds() if shape.name in ("crowd", "crowd-page128"))
    return [one for one in cases if not one.id.startswith("crowd-page128-draft")]


@behaviour(
    Fixture.PROGRAM, cases=_programs, since=SINCE, bugs=("sglang#28569", "sglang#28767", "vllm#54418", "vllm#51119")
)
def large_graphs_and_larger_batches(graphs: GraphHarness, program: Program) -> None:
    """A graph of ten requests that was captured on a short request is right for thousands of keys.

    Between the replays an eager batch of 24 requests runs, which is larger than the graph.
    """
    harness, size = graphs.harness, CROWD.capture_batch_sizes[-1]
    geometry, mode = harness.geometry, MODES[program]
    step = draft_steps(geometry) - 1 if mode is Mode.DRAFT else 0
    graphs.capture(GraphKey(program, size), short=True)
    for number, lens in enumerate((PREFIXES[8:11], PREFIXES[:size], PREFIXES[8:11])):
        replayed = uniform(f"replay-{number}", geometry, mode, lens, size, step=step, tree="random", seed=number)
        graphs.assert_replay(program, graphs.load_replay(replayed, number, poison=True))
        eager = harness.place(crowd(geometry, mode, step))
        harness.assert_forward(eager, harness.load(eager, seed=number), "an eager forward above the largest graph")


def _full() -> list[Case]:
    models = [
        shape.case(full(shape.geometry, mode, step), mode.value)
        for shape in full_size()
        for mode, step in last_steps(shape.geometry).items()
    ]
    return [*models, *features.full_size()]


@on_device_only(Fixture.FORWARD, cases=_full, since=SINCE, bugs=("vllm#50065", "sglang#14173", "vllm#40383"))
def full_size_is_right_on_device(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right on the device for 33 requests of up to 8,192 tokens, in model head shapes, modes and features.

    The features are those of the profiles, each in every mode that it has.
    """
    assert_forward(harness, forward, Contents.WEIGHED, Contents.NEEDLES)


def assert_served_or_named(subject: BackendUnderTest, special: Special, what: str) -> None:
    """Check that a feature is served with right outputs, or refused with a reason that contains one of its words.

    Args:
        what: layers that have the feature, with their verb, for the message.
    """
    from ..harness.harness import Harness

    pages = max(one.num_pages for one in special.forwards)
    try:
        harness = Harness(subject, special.geometry, pages)
    except Refused as refusal:
        if any(word in reason for reason in refusal.reasons for word in special.words):
            return
        raise ContractViolation(
            f"{what} refused without a reason that names what is not served",
            batch=brief(special.geometry),
            got=refusal.reasons,
            expected=f"a reason with {' or '.join(special.words)}",
            formula="supports(geometry)",
        ) from refusal
    for number, forward in enumerate(special.forwards):
        placed = harness.place(forward)
        harness.assert_forward(placed, harness.load(placed, contents=Contents.SPREAD, seed=number))


def assert_forward(harness: Harness, forward: ForwardCase, *contents: Contents) -> None:
    """Check the forward once with each of these kinds of values in rows and cache, on poisoned buffers."""
    for one in contents:
        harness.poison()
        harness.assert_forward(forward, harness.load(forward, contents=one), f"with {one} contents the output")
