"""Captured programs: the captured run's own output, replays against float64, pointers, keys, the captured region."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.errors import GraphError
from draftmark.geometry import CORE_MODES, Geometry, Limits
from draftmark.graphs import GraphKey, Program, padded_batch_size

from ..behaviour import Given, behaviour
from ..cases.forward_sets import extends
from ..cases.geometries import PAGE128, SMALL, TREE, shapes
from ..cases.graph_rounds import LARGE, SIZES, WALL, captured, programs_of, replays
from ..check import Case, ContractViolation

if TYPE_CHECKING:
    from ..harness.graph_harness import GraphHarness

ALSO = (
    *("target-window", "draft-window", "draft-page1-words2", "target-page1-words2"),
    *("target-overlap", "target-page32-long", "draft-chain", "all-modes", "all-few-graphs", "all-kv8"),
)
"""Shapes beside those that every check takes."""


def _programs() -> list[Case]:
    return [
        shape.case((shape.geometry, program), program.value)
        for shape in shapes(*ALSO)
        for program in programs_of(shape.geometry)
    ]


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes(*ALSO)]


@behaviour(Given.PROGRAM, cases=_programs, bugs=("sglang#26521", "vllm#53821", "sglang#31367", "vllm#53658"))
def captured_run_is_right(graphs: GraphHarness, program: Program) -> None:
    """(a) The warm-up on the static buffers directly before capture, and (b) two replays with no write between."""
    for size in graphs.harness.geometry.limits.capture_batch_sizes:
        graphs, key = graphs.fresh(), GraphKey(program, size)
        loaded, warm = graphs.warm_up(key)
        graphs.round_holds(loaded, warm, f"the warm-up before capturing {key}")
        graphs.clear_outputs()
        copies = graphs.record(key, loaded)
        for which in ("first", "second"):
            graphs.plan(loaded)
            graphs.replay(key, loaded)
            what = f"the {which} replay of {key}, with nothing written since the capture"
            graphs.round_holds(loaded, copies, what)
            graphs.clear_outputs()


@behaviour(
    Given.PROGRAM,
    cases=_programs,
    bugs=("sglang#26655", "sglang#26019", "sglang#10892", "rtp-llm#1084", "TRT-LLM#17110"),
)
def replay_equals_eager(graphs: GraphHarness, program: Program) -> None:
    """Replays of every size, growing and shrinking in batch and length, on poisoned and on dirty buffers."""
    geometry = graphs.harness.geometry
    for size in reversed(geometry.limits.capture_batch_sizes):
        graphs.capture(GraphKey(program, size))
    for number, (poison, forward) in enumerate(replays(geometry, program)):
        graphs.replay_holds(program, graphs.load_replay(forward, number, poison))


@behaviour(Given.PROGRAM, cases=_programs, bugs=("TRT-LLM#16319", "vllm#51119", "xLLM#1466"))
def capture_order_does_not_matter(graphs: GraphHarness, program: Program) -> None:
    """Captured from the smallest size up, with one short live request; replayed on full and long batches."""
    geometry = graphs.harness.geometry
    for size in geometry.limits.capture_batch_sizes:
        graphs.capture(GraphKey(program, size), short=True)
    for number, which in enumerate(WALL):
        poison, forward = replays(geometry, program)[which]
        graphs.replay_holds(program, graphs.load_replay(forward, number, poison))


@behaviour(Given.GRAPHS, cases=_geometries, bugs=("sglang#31198", "vllm#48261", "TRT-LLM#10393", "flashinfer#1028"))
def programs_do_not_disturb_each_other(graphs: GraphHarness, geometry: Geometry) -> None:
    """All programs captured on one arena, replayed in turn with eager forwards of other modes between."""
    harness, kinds = graphs.harness, programs_of(geometry)
    for program in kinds:
        graphs.capture(GraphKey(program, geometry.limits.capture_batch_sizes[-1]))
    between = [harness.place(forward) for forward in extends(geometry)]
    rounds = [(program, replays(geometry, program)[which][1]) for program in kinds for which in LARGE]
    for number, (program, forward) in enumerate(rounds[::2] + rounds[1::2]):
        eager = between[number % len(between)]
        harness.forward_holds(eager, harness.load(eager), "an eager forward between two replays")
        graphs.replay_holds(program, graphs.load_replay(forward, number), f"after {eager.name}")


@behaviour(Given.GRAPHS, cases=_geometries, bugs=("sglang#26665", "sglang#40396"))
def keys_are_closed_under_padding(graphs: GraphHarness, geometry: Geometry) -> None:
    """Every program at every captured size is there after all captures, and any number of live requests finds one."""
    sizes = geometry.limits.capture_batch_sizes
    wanted = sorted(GraphKey(program, size) for program in programs_of(geometry) for size in sizes)
    loaded = {key: graphs.capture(key, short=True) for key in wanted}
    _keys_are(graphs, wanted, geometry)
    for key, one in loaded.items():
        graphs.replay_holds(key.program, graphs.load(one.forwards[-1]), "with every key captured")
    pool = graphs.state.pool_bytes
    if not isinstance(pool, int) or pool < 0:
        raise ContractViolation("pool_bytes must be a count of bytes", got=pool, bug="sglang#24453")
    fresh, key = graphs.harness.subject.graph_state(geometry), wanted[0]
    misuses: dict[str, Callable[[], object]] = {
        "replays a key that it never captured": lambda: fresh.replay(key),
        "captures a key that it has captured before": lambda: graphs.state.capture(key, lambda: None),
    }
    for what, misuse in misuses.items():
        try:
            misuse()
        except GraphError:
            continue
        raise ContractViolation(
            f"a graph state {what}", got="no error", expected="GraphError", formula="draftmark.graphs.GraphState"
        )


def _cold() -> list[Case]:
    """Sizes that no other check has: what a module keeps by them is made here first, inside a capture."""
    made = {
        "page16": Geometry.create(SMALL, Limits(3, 117, 32, (1, 3)), TREE, modes=CORE_MODES),
        "page128": Geometry.create(PAGE128, Limits(3, 399, 32, (1, 3)), TREE, modes=CORE_MODES),
    }
    return [Case(f"{name}-{one.value}", (made[name], one), (1, 3)) for name in made for one in programs_of(made[name])]


@behaviour(Given.PROGRAM, cases=_cold, since=(1, 3))
def a_capture_may_come_first(graphs: GraphHarness, program: Program) -> None:
    """Two sizes captured before anything ran eagerly, then eager forwards, then replays of the second and the first."""
    harness, sizes = graphs.harness, graphs.harness.geometry.limits.capture_batch_sizes
    for size in sizes:
        graphs.capture_cold(GraphKey(program, size))
    for number, size in enumerate(reversed(sizes)):
        forward = harness.place(captured(harness.geometry, program, size))
        harness.tensors.fill_cache(forward, number)
        harness.forward_holds(forward, harness.load(forward, seed=number), "an eager forward after a cold capture")
        graphs.replay_holds(program, graphs.load(forward, seed=number), "captured before anything ran")


def _many() -> list[Case]:
    """Every batch size to 18 has a graph; of one KV head, since 18 captures are many for an interpreter."""
    limits = Limits(18, 84, 32, tuple(range(1, 19)))
    shapes_of = {"page16": SMALL, "page128": PAGE128}
    made = {
        name: Geometry.create(replace(one, num_qo_heads=2, num_kv_heads=1), limits, TREE, modes=CORE_MODES)
        for name, one in shapes_of.items()
    }
    few = (Program.DECODE, Program.VERIFY)
    return [Case(f"{name}-{one.value}", (made[name], one), (1, 3)) for name in made for one in few]


@behaviour(Given.PROGRAM, cases=_many, since=(1, 3), bugs=("vllm#26499",))
def outputs_stay_while_another_state_replays(graphs: GraphHarness, program: Program) -> None:
    """A graph for every batch size, and a second graph state; what one gave is as it was after the other's replay."""
    geometry, other = graphs.harness.geometry, graphs.fresh()
    sizes = geometry.limits.capture_batch_sizes
    in_both = (sizes[0], sizes[len(sizes) // 2], sizes[-1])
    for one, its_sizes in ((graphs, sizes), (other, in_both)):
        for size in reversed(its_sizes):
            one.capture(GraphKey(program, size), short=True)
    for size in sizes:
        key, forward = GraphKey(program, size), captured(geometry, program, size)
        graphs.replay_holds(program, graphs.load(forward, seed=size), "with a graph for every batch size")
        if size not in in_both:
            continue
        before = graphs.outputs(key)
        shorter = captured(geometry, program, size, short=True)
        other.replay_holds(program, other.load(shorter, seed=size + 1), "in a second graph state")
        if graphs.outputs(key) != before:
            raise ContractViolation(
                f"what the replay of {key} gave was overwritten by a replay of another graph state",
                got="other bytes in its outputs",
                expected="outputs that are valid until the next replay of their own state",
                formula="draftmark.graphs.GraphState.replay",
            )


@behaviour(Given.PROGRAM, cases=_programs, bugs=("sglang#27664", "rtp-llm#1259", "vllm-ascend#8508"))
def replays_move_no_buffer(graphs: GraphHarness, program: Program) -> None:
    """Arena addresses, and the memory that the backend holds, are the same after capture, plans and replays."""
    harness = graphs.harness
    for size in harness.geometry.limits.capture_batch_sizes:
        graphs.capture(GraphKey(program, size))
    held, addresses = harness.held(), harness.arena.addresses()
    for number, (_, forward) in enumerate(replays(harness.geometry, program)):
        loaded = graphs.load_replay(forward, number)
        if number in SIZES:
            graphs.replay_holds(program, loaded)
        else:  # of what runs between two replays, only a plan could move memory
            graphs.plan(loaded)
        moved = sorted(name for address, name in harness.held().items() if address not in held)
        if moved or harness.arena.addresses() != addresses:
            raise ContractViolation(
                "memory that a graph uses moved between replays",
                batch=forward,
                got=moved or "arena buffers",
                expected="the addresses of the capture",
                bug="sglang#27664",
            )


def _keys_are(graphs: GraphHarness, wanted: list[GraphKey], geometry: Geometry) -> None:
    """The keys are those captured, and one is large enough for any number of live requests up to the largest."""
    sizes = geometry.limits.capture_batch_sizes
    padded = {padded_batch_size(n, sizes) for n in range(1, min(geometry.limits.max_num_reqs, sizes[-1]) + 1)}
    if set(graphs.state.keys) != set(wanted) or not padded <= set(sizes):
        raise ContractViolation(
            "some captured key is missing from the graph state",
            got=sorted(map(str, graphs.state.keys)),
            expected=sorted(map(str, wanted)),
            bug="sglang#40396",
        )
