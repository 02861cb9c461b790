"""Checks of captured graphs: outputs at capture and replay, addresses, keys, and the order of captures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.errors import GraphError
from draftmark.geometry import CORE_MODES, Geometry, Limits
from draftmark.graphs import GraphKey, Program, padded_batch_size

from ..behaviour import Fixture, behaviour
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
"""Shapes that these checks run in addition to the shapes that every check runs."""
REPLAYED = ("target-page1-words2", "all-modes", "all-few-graphs", "all-kv8")
"""Such shapes of the check with the most replays; `capture_order_does_not_matter` replays the others."""
FEW = ("target-window", "target-page1-words2", "all-modes")
"""Such shapes of checks that need neither other host lengths nor other draft shapes."""


def _programs(*also: str) -> list[Case]:
    return [
        shape.case((shape.geometry, program), program.value)
        for shape in shapes(*(also or ALSO))
        for program in programs_of(shape.geometry)
    ]


def _replayed_programs() -> list[Case]:
    return _programs(*REPLAYED)


def _few_programs() -> list[Case]:
    return _programs(*FEW)


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes(*ALSO)]


@behaviour(Fixture.PROGRAM, cases=_few_programs, bugs=("sglang#26521", "vllm#53821", "sglang#31367", "vllm#53658"))
def captured_run_is_right(graphs: GraphHarness, program: Program) -> None:
    """The warm-up run before a capture and two replays right after it give right outputs.

    All three use the static buffers. Nothing is written to the inputs between the capture and the replays.
    """
    for size in graphs.harness.geometry.limits.capture_batch_sizes:
        graphs, key = graphs.fresh(), GraphKey(program, size)
        loaded = graphs.capture_checked(key)
        for which in ("first", "second"):
            graphs.assert_replay(program, loaded, f"the {which} time, with nothing written since the capture")
            graphs.clear_outputs()


@behaviour(
    Fixture.PROGRAM,
    cases=_replayed_programs,
    bugs=("sglang#26655", "sglang#26019", "sglang#10892", "rtp-llm#1084", "TRT-LLM#17110"),
)
def replay_equals_eager(graphs: GraphHarness, program: Program) -> None:
    """Replays of every captured batch size are right, on poisoned buffers and on dirty ones.

    Batch sizes and lengths grow and shrink from one replay to the next.
    """
    geometry = graphs.harness.geometry
    for size in reversed(geometry.limits.capture_batch_sizes):
        graphs.capture(GraphKey(program, size))
    for number, (poison, forward) in enumerate(graphs.rounds(program)):
        graphs.assert_replay(program, graphs.load_replay(forward, number, poison))


@behaviour(Fixture.PROGRAM, cases=_programs, bugs=("TRT-LLM#16319", "vllm#51119", "xLLM#1466"))
def capture_order_does_not_matter(graphs: GraphHarness, program: Program) -> None:
    """Graphs captured from the smallest size up, on one short request, are right on full and long batches."""
    geometry = graphs.harness.geometry
    for size in geometry.limits.capture_batch_sizes:
        graphs.capture(GraphKey(program, size), short=True)
    for number, which in enumerate(WALL):
        poison, forward = graphs.rounds(program)[which]
        graphs.assert_replay(program, graphs.load_replay(forward, number, poison))


@behaviour(Fixture.GRAPHS, cases=_geometries, bugs=("sglang#31198", "vllm#48261", "TRT-LLM#10393", "flashinfer#1028"))
def programs_do_not_disturb_each_other(graphs: GraphHarness, geometry: Geometry) -> None:
    """All programs captured on one arena stay right when their replays alternate with eager forwards of other modes."""
    harness, kinds = graphs.harness, graphs.programs
    for program in kinds:
        graphs.capture(GraphKey(program, geometry.limits.capture_batch_sizes[-1]))
    between = [harness.place(forward) for forward in extends(geometry)]
    rounds = [(program, graphs.rounds(program)[which][1]) for program in kinds for which in LARGE]
    for number, (program, forward) in enumerate(rounds[::2] + rounds[1::2]):
        eager = between[number % len(between)]
        harness.assert_forward(eager, harness.load(eager), "an eager forward between two replays")
        graphs.assert_replay(program, graphs.load_replay(forward, number), f"after {eager.name}")


@behaviour(Fixture.GRAPHS, cases=_geometries, bugs=("sglang#26665", "sglang#40396"))
def keys_are_closed_under_padding(graphs: GraphHarness, geometry: Geometry) -> None:
    """After all captures every program has a graph of every size, and any number of live requests fits some graph.

    A graph state raises GraphError for a replay of a key that was never captured, and for a second capture of a key.
    """
    sizes = geometry.limits.capture_batch_sizes
    wanted = sorted(GraphKey(program, size) for program in programs_of(geometry) for size in sizes)
    loaded = {key: graphs.capture(key, short=True) for key in wanted}
    _assert_keys(graphs, wanted, geometry)
    for key, one in loaded.items():
        graphs.assert_replay(key.program, graphs.load(one.forwards[-1]), "with every key captured")
    pool = graphs.state.pool_bytes
    if not isinstance(pool, int) or pool < 0:
        raise ContractViolation("pool_bytes must be a number of bytes, 0 or more", got=pool, bug="sglang#24453")
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
    """Return cases with sizes that no other check uses, so that caches keyed by size are still empty at the capture."""
    made = {
        "page16": Geometry.create(SMALL, Limits(3, 117, 32, (1, 3)), TREE, modes=CORE_MODES),
        "page128": Geometry.create(PAGE128, Limits(3, 399, 32, (1, 3)), TREE, modes=CORE_MODES),
    }
    return [Case(f"{name}-{one.value}", (made[name], one), (1, 3)) for name in made for one in programs_of(made[name])]


@behaviour(Fixture.PROGRAM, cases=_cold, since=(1, 3))
def a_capture_may_come_first(graphs: GraphHarness, program: Program) -> None:
    """A capture may be the first run of a backend: its replays, and eager forwards after it, are right.

    The check captures two sizes, runs eager forwards, and then replays the second and the first graph.
    """
    harness, sizes = graphs.harness, graphs.harness.geometry.limits.capture_batch_sizes
    for size in sizes:
        graphs.capture_cold(GraphKey(program, size))
    for number, size in enumerate(reversed(sizes)):
        forward = harness.place(captured(harness.geometry, program, size))
        harness.tensors.fill_cache(forward, number)
        harness.assert_forward(forward, harness.load(forward, seed=number), "an eager forward after a cold capture")
        graphs.assert_replay(program, graphs.load(forward, seed=number), "captured before anything ran")


def _many() -> list[Case]:
    """Return cases with a graph for every batch size up to 18. One KV head keeps 18 captures fast in an interpreter."""
    limits = Limits(18, 84, 32, tuple(range(1, 19)))
    shapes_of = {"page16": SMALL, "page128": PAGE128}
    made = {
        name: Geometry.create(replace(one, num_qo_heads=2, num_kv_heads=1), limits, TREE, modes=CORE_MODES)
        for name, one in shapes_of.items()
    }
    few = (Program.DECODE, Program.VERIFY)
    return [Case(f"{name}-{one.value}", (made[name], one), (1, 3)) for name in made for one in few]


@behaviour(Fixture.PROGRAM, cases=_many, since=(1, 3), bugs=("vllm#26499",))
def outputs_stay_while_another_state_replays(graphs: GraphHarness, program: Program) -> None:
    """The outputs of a replay stay unchanged while a second graph state of the same geometry replays.

    After the second graph state is dropped, the graphs of the first one still replay right.
    """
    geometry, other = graphs.harness.geometry, graphs.fresh()
    sizes = geometry.limits.capture_batch_sizes
    in_both = (sizes[0], sizes[len(sizes) // 2], sizes[-1])
    for one, its_sizes in ((graphs, sizes), (other, in_both)):
        for size in reversed(its_sizes):
            one.capture(GraphKey(program, size), short=True)
    for size in sizes:
        key, forward = GraphKey(program, size), captured(geometry, program, size)
        graphs.assert_replay(program, graphs.load(forward, seed=size), "with a graph for every batch size")
        if size not in in_both:
            continue
        before = graphs.outputs(key)
        shorter = captured(geometry, program, size, short=True)
        other.assert_replay(program, other.load(shorter, seed=size + 1), "in a second graph state")
        if graphs.outputs(key) != before:
            raise ContractViolation(
                f"the outputs of the replay of {key} were overwritten by a replay of another graph state",
                got="other bytes in its outputs",
                expected="outputs that stay valid until the next replay of their own state",
                formula="draftmark.graphs.GraphState.replay",
            )
    other.sleep()
    for size in in_both:
        forward = captured(geometry, program, size)
        graphs.assert_replay(program, graphs.load(forward, seed=size), "after another graph state was dropped")


@behaviour(Fixture.PROGRAM, cases=_few_programs, bugs=("sglang#27664", "rtp-llm#1259", "vllm-ascend#8508"))
def replays_move_no_buffer(graphs: GraphHarness, program: Program) -> None:
    """Captures, plans and replays change no arena address and allocate no memory that the backend keeps."""
    harness = graphs.harness
    for size in harness.geometry.limits.capture_batch_sizes:
        graphs.capture(GraphKey(program, size))
    held, addresses = harness.held(), harness.arena.addresses()
    for number, (_, forward) in enumerate(replays(harness.geometry, program)):
        loaded = graphs.load_replay(forward, number)
        if number in SIZES:
            graphs.assert_replay(program, loaded)
        else:  # Here the loop only calls plan(): a replay runs captured work, which cannot move memory.
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


def _assert_keys(graphs: GraphHarness, wanted: list[GraphKey], geometry: Geometry) -> None:
    """Check that `state` has exactly these keys, and that a graph exists for any number of live requests."""
    sizes = geometry.limits.capture_batch_sizes
    padded = {padded_batch_size(n, sizes) for n in range(1, min(geometry.limits.max_num_reqs, sizes[-1]) + 1)}
    if set(graphs.state.keys) != set(wanted) or not padded <= set(sizes):
        raise ContractViolation(
            "some captured key is missing from the graph state",
            got=sorted(map(str, graphs.state.keys)),
            expected=sorted(map(str, wanted)),
            bug="sglang#40396",
        )
