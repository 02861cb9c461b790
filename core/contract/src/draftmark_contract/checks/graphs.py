"""Captured programs: the captured run's own output, replays against float64, pointers, keys, the captured region."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from draftmark.geometry import Geometry
from draftmark.graphs import GraphKey, Program

from ..behaviour import behaviour
from ..cases.forwards import ForwardCase
from ..cases.geometries import shapes
from ..cases.graph_rounds import LARGE, SIZES, WALL, captured, programs_of, replays
from ..check import Case, ContractViolation

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..harness.graph_harness import GraphHarness, Loaded

ALSO = (
    *("target-window", "draft-window", "draft-page1-words2", "target-page1-words2"),
    *("target-overlap", "target-page32-long", "draft-chain"),
)
"""Shapes beside those that every check takes."""
Value = tuple[Geometry, Program]


def _programs() -> list[Case]:
    return [
        shape.case((shape.geometry, program), program.value)
        for shape in shapes(*ALSO)
        for program in programs_of(shape.geometry)
    ]


def _geometries() -> list[Case]:
    return [shape.case(shape.geometry) for shape in shapes(*ALSO)]


@behaviour(cases=_programs, bugs=("sglang#26521", "vllm#53821", "sglang#31367", "vllm#53658"))
def captured_run_is_right(subject: BackendUnderTest, value: Value) -> None:
    """(a) The warm-up on the static buffers directly before capture, and (b) two replays with no write between."""
    geometry, program = value
    for size in geometry.limits.capture_batch_sizes:
        harness, programs = _open(subject, geometry)
        key = GraphKey(program, size)
        loaded, warm = _warm_up(harness, programs, key)
        programs.holds(loaded, warm, f"the warm-up before capturing {key}")
        programs.clear_outputs()
        copies = _record(harness, programs, key, loaded)
        for which in ("first", "second"):
            programs.replay(key, loaded)
            programs.holds(loaded, copies, f"the {which} replay of {key}, with nothing written since the capture")
            programs.clear_outputs()


@behaviour(cases=_programs, bugs=("sglang#26655", "sglang#26019", "sglang#10892", "rtp-llm#1084", "TRT-LLM#17110"))
def replay_equals_eager(subject: BackendUnderTest, value: Value) -> None:
    """Replays of every size, growing and shrinking in batch and length, on poisoned and on dirty buffers."""
    geometry, program = value
    harness, programs = _open(subject, geometry)
    for size in reversed(geometry.limits.capture_batch_sizes):
        _capture(harness, programs, GraphKey(program, size))
    for number, (poison, forward) in enumerate(replays(geometry, program)):
        _replay(programs, program, _load(harness, programs, forward, number, poison))


@behaviour(cases=_programs, bugs=("TRT-LLM#16319", "vllm#51119", "xLLM#1466"))
def capture_order_does_not_matter(subject: BackendUnderTest, value: Value) -> None:
    """Captured from the smallest size up, with one short live request; replayed on full and long batches."""
    geometry, program = value
    harness, programs = _open(subject, geometry)
    for size in geometry.limits.capture_batch_sizes:
        _capture(harness, programs, GraphKey(program, size), short=True)
    for number, which in enumerate(WALL):
        poison, forward = replays(geometry, program)[which]
        _replay(programs, program, _load(harness, programs, forward, number, poison))


@behaviour(cases=_geometries, bugs=("sglang#31198", "vllm#48261", "TRT-LLM#10393", "flashinfer#1028"))
def programs_do_not_disturb_each_other(subject: BackendUnderTest, geometry: Geometry) -> None:
    """All programs captured on one arena, replayed in forward with eager forwards of other modes between."""
    from ..cases.forward_sets import extends
    from ..harness import expect as verify
    from ..harness.harness import place

    harness, programs = _open(subject, geometry)
    kinds = programs_of(geometry)
    for program in kinds:
        _capture(harness, programs, GraphKey(program, geometry.limits.capture_batch_sizes[-1]))
    between = [place(harness, forward) for forward in extends(geometry)]
    rounds = [(program, replays(geometry, program)[which][1]) for program in kinds for which in LARGE]
    for number, (program, forward) in enumerate(rounds[::2] + rounds[1::2]):
        eager = between[number % len(between)]
        verify.forward_holds(harness, eager, harness.load(eager), "an eager forward between two replays")
        _replay(programs, program, programs.load(place(harness, forward), seed=number), f"after {eager.name}")


@behaviour(cases=_geometries, bugs=("sglang#26665", "sglang#40396"))
def keys_are_closed_under_padding(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Every program at every captured size is there after all captures, and any number of live requests finds one."""
    from draftmark.errors import GraphError

    harness, programs = _open(subject, geometry)
    sizes = geometry.limits.capture_batch_sizes
    wanted = sorted(GraphKey(program, size) for program in programs_of(geometry) for size in sizes)
    loaded = {key: _capture(harness, programs, key, short=True) for key in wanted}
    _keys_are(programs, wanted, geometry)
    for key, one in loaded.items():
        _replay(programs, key.program, programs.load(one.forwards[-1]), "with every key captured")
    if not isinstance(programs.state.pool_bytes, int) or programs.state.pool_bytes < 0:
        raise ContractViolation(
            "pool_bytes must be a count of bytes", got=programs.state.pool_bytes, bug="sglang#24453"
        )
    fresh, key = subject.graph_state(geometry), wanted[0]
    misuses: dict[str, Callable[[], object]] = {
        "replays a key that it never captured": lambda: fresh.replay(key),
        "captures a key that it has captured before": lambda: programs.state.capture(key, lambda: None),
    }
    for what, misuse in misuses.items():
        try:
            misuse()
        except GraphError:
            continue
        raise ContractViolation(
            f"a graph state {what}", got="no error", expected="GraphError", formula="draftmark.graphs.GraphState"
        )


@behaviour(cases=_programs, bugs=("sglang#27664", "rtp-llm#1259", "vllm-ascend#8508"))
def replays_move_no_buffer(subject: BackendUnderTest, value: Value) -> None:
    """Arena addresses, and the memory that the backend holds, are the same after capture, plans and replays."""
    from ..harness.reachable import reachable_storages

    geometry, program = value
    harness, programs = _open(subject, geometry)
    for size in geometry.limits.capture_batch_sizes:
        _capture(harness, programs, GraphKey(program, size))
    held, addresses = reachable_storages(harness.backend), harness.arena.addresses()
    for number, (_, forward) in enumerate(replays(geometry, program)):
        loaded = _load(harness, programs, forward, number)
        if number in SIZES:
            _replay(programs, program, loaded)
        else:  # of what runs between two replays, only a plan could move memory
            programs.plan(loaded)
        now = reachable_storages(harness.backend)
        moved = sorted(name for address, name in now.items() if address not in held)
        if moved or harness.arena.addresses() != addresses:
            raise ContractViolation(
                "memory that a graph uses moved between replays",
                batch=forward,
                got=moved or "arena buffers",
                expected="the addresses of the capture",
                bug="sglang#27664",
            )


def _open(subject: BackendUnderTest, geometry: Geometry) -> tuple[Any, GraphHarness]:
    from ..harness.graph_harness import GraphHarness
    from ..harness.harness import Harness, pool_pages

    pages = max(
        pool_pages(geometry),
        *(forward.num_pages for program in programs_of(geometry) for _, forward in replays(geometry, program)),
    )
    harness = Harness(subject, geometry, pages)
    return harness, GraphHarness(harness)


def _keys_are(programs: GraphHarness, wanted: list[GraphKey], geometry: Geometry) -> None:
    """The graph state's keys are those captured, and one is large enough for any number of live requests."""
    from draftmark.graphs import padded_batch_size

    sizes = geometry.limits.capture_batch_sizes
    padded = {padded_batch_size(n, sizes) for n in range(1, geometry.limits.max_num_reqs + 1)}
    if set(programs.state.keys) != set(wanted) or not padded <= set(sizes):
        raise ContractViolation(
            "some captured key is missing from the graph state",
            got=sorted(map(str, programs.state.keys)),
            expected=sorted(map(str, wanted)),
            bug="sglang#40396",
        )


def _warm_up(harness: Any, programs: GraphHarness, key: GraphKey, short: bool = False) -> tuple[Loaded, Any]:
    """Run a key's step eagerly on the batch of its capture: the round, and copies of its metadata."""
    from ..harness.harness import place

    loaded = programs.load(
        place(harness, captured(harness.geometry, key.program, key.batch_size, short)), host=programs.capture_host
    )
    harness.arena.poison()
    programs.plan(loaded)
    return loaded, programs.step(loaded)


def _record(harness: Any, programs: GraphHarness, key: GraphKey, loaded: Loaded) -> Any:
    harness.arena.poison()
    programs.plan(loaded)
    return programs.capture(key, loaded)


def _capture(harness: Any, programs: GraphHarness, key: GraphKey, short: bool = False) -> Loaded:
    """Warm up and capture, as an engine does at start-up. `captured_run_is_right` looks at what comes out."""
    loaded, _ = _warm_up(harness, programs, key, short)
    _record(harness, programs, key, loaded)
    return loaded


def _load(harness: Any, programs: GraphHarness, forward: ForwardCase, number: int, poison: bool = False) -> Loaded:
    """Put replay `number` on the stages, with host lengths of its kind."""
    from ..harness.harness import place

    if poison:
        harness.arena.poison()
    return programs.load(place(harness, forward), seed=number, host=programs.replay_host(number))


def _replay(programs: GraphHarness, program: Program, loaded: Loaded, what: str = "") -> None:
    """Plan and replay a loaded round, and check it."""
    forward = loaded.forwards[-1]
    key = GraphKey(program, len(forward.requests))
    programs.plan(loaded)
    programs.replay(key, loaded)
    programs.holds(loaded, programs.copies[key], f"the replay of {key} on {forward.name} {what}".rstrip())
