"""Items that test captured graphs: replays with new inputs in fixed memory, padded to the captured size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from draftmark.geometry import AttentionShape, Geometry
from draftmark.graphs import GraphKey, Program

from ...cases.forwards import ForwardCase, uniform
from ...cases.graph_rounds import MODES, programs_of
from ...check import Refused
from ...runner.item import Item, item_of
from ..driver import EngineCapabilities
from ..graph_harness import EngineGraphs
from ..harness import EngineHarness
from .building import SMALL, case_of, fitted, on_layer

RIGHT, EAGER = "graphs.captured_run_is_right", "graphs.replay_equals_eager"
TURNS, ORDER, PADDED = (
    "graphs.programs_do_not_disturb_each_other",
    "graphs.capture_order_does_not_matter",
    "graphs.keys_are_closed_under_padding",
)
SHAPES: dict[str, AttentionShape] = {
    "fp32": SMALL,
    "window": replace(SMALL, window_left=19),
    "bf16-128": replace(SMALL, q_dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, num_qo_heads=8),
    "page128": replace(SMALL, page_size=128),
}


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return items that test each program by itself, all programs in alternation, and both orders of capture."""
    found = []
    for name, shape in SHAPES.items():
        geometry = fitted(caps, shape)
        programs, order = programs_of(geometry), list[Item]()
        for program in programs:
            case = f"{name}-{program.value}"
            found += [case_of(caps, rule, case, (geometry, program)) for rule in (RIGHT, EAGER)]
            most = geometry.limits.max_num_reqs
            pages = _live(geometry, program, most, most).num_pages
            found.append(on_layer(caps, PADDED, case, geometry, pages, partial(_padded, program=program)))
            order.append(case_of(caps, ORDER, case, (geometry, program)))
        if len(programs) > 1:
            found.append(case_of(caps, TURNS, name, geometry))
        found.append(item_of(ORDER, name, partial(_each_served, order)))
    return found


def _each_served(items: Sequence[Item]) -> None:
    """Run the items of all programs; the whole is refused if each of them is."""
    refusals = []
    for one in items:
        try:
            one.run()
        except Refused as refusal:
            refusals.append(refusal)
    if len(refusals) == len(items):
        raise refusals[0]


def _padded(harness: EngineHarness, program: Program) -> None:
    """Replay batches with every number of live requests from one to the captured size, in each captured size.

    An engine has no graph state that could list its keys.
    """
    graphs, limits = EngineGraphs(harness), harness.geometry.limits
    for size in reversed(limits.capture_batch_sizes):
        graphs.capture(GraphKey(program, size))
    for live in range(1, limits.max_num_reqs + 1):
        for size in (one for one in limits.capture_batch_sizes if one >= live):
            graphs.assert_replay(program, graphs.load(_live(harness.geometry, program, live, size), live))


def _live(geometry: Geometry, program: Program, live: int, size: int) -> ForwardCase:
    lens = [37 * n % 200 for n in range(live)]
    return uniform(f"{program.value}-{live}", geometry, MODES[program], lens, size, tree="chain")
