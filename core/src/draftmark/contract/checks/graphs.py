"""Captured programs: the captured run's own output, replays against float64, pointers, keys, the captured region."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...geometry import Geometry
from ...graphs import GraphKey, Program
from ..check import Case, ContractViolation
from ..scenarios.rounds import captured, programs_of, replays
from ..scenarios.shapes import shapes
from ..scenarios.tiers import behaviour
from ..scenarios.turns import Turn

if TYPE_CHECKING:
    from ..scenarios.program import Programs
    from ..subject import Subject

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
def captured_run_is_right(subject: Subject, value: Value) -> None:
    """(a) The warm-up on the static buffers directly before capture, and (b) the first replay with no write between."""
    geometry, program = value
    for size in geometry.limits.capture_batch_sizes:
        rig, programs = _open(subject, geometry)
        _capture(rig, programs, program, size, "the first replay, with nothing written since the capture")


@behaviour(cases=_programs, bugs=("sglang#26655", "sglang#26019", "sglang#10892", "rtp-llm#1084", "TRT-LLM#17110"))
def replay_equals_eager(subject: Subject, value: Value) -> None:
    """Replays of every size, growing and shrinking in batch and length, on poisoned and on dirty buffers."""
    geometry, program = value
    rig, programs = _open(subject, geometry)
    for size in reversed(geometry.limits.capture_batch_sizes):
        _capture(rig, programs, program, size)
    _replay_all(rig, programs, geometry, program)


@behaviour(cases=_programs, bugs=("TRT-LLM#16319", "vllm#51119", "xLLM#1466"))
def capture_order_does_not_matter(subject: Subject, value: Value) -> None:
    """Captured from the smallest size up, with one short live request; replayed on full and long batches."""
    geometry, program = value
    rig, programs = _open(subject, geometry)
    for size in geometry.limits.capture_batch_sizes:
        _capture(rig, programs, program, size, short=True)
    _replay_all(rig, programs, geometry, program)


@behaviour(cases=_geometries, bugs=("sglang#31198", "vllm#48261", "TRT-LLM#10393", "flashinfer#1028"))
def programs_do_not_disturb_each_other(subject: Subject, geometry: Geometry) -> None:
    """All programs captured on one arena, replayed in turn with eager forwards of other modes between."""
    from ..scenarios import verify
    from ..scenarios.rig import place
    from ..scenarios.scenes import extends

    rig, programs = _open(subject, geometry)
    kinds = programs_of(geometry)
    size = geometry.limits.capture_batch_sizes[-1]
    copies = {program: _capture(rig, programs, program, size) for program in kinds}
    between = [place(rig, turn) for turn in extends(geometry)]
    rounds = [
        (program, turn) for program in kinds for _, turn in replays(geometry, program) if len(turn.requests) == size
    ]
    for number, (program, turn) in enumerate(rounds[::2] + rounds[1::2]):
        eager = between[number % len(between)]
        verify.turn_holds(rig, eager, rig.load(eager), "an eager forward between two replays")
        loaded = programs.load(place(rig, turn), seed=number)
        programs.plan(loaded)
        programs.replay(GraphKey(program, size), loaded)
        programs.holds(loaded, copies[program], f"the replay of {program.value} after {eager.name}")


@behaviour(cases=_geometries, bugs=("sglang#26665", "sglang#40396"))
def keys_are_closed_under_padding(subject: Subject, geometry: Geometry) -> None:
    """Every program at every captured size is there afterwards, and any number of live requests finds one."""
    from ...errors import GraphError
    from ...graphs import padded_batch_size

    rig, programs = _open(subject, geometry)
    sizes = geometry.limits.capture_batch_sizes
    wanted = {GraphKey(program, size) for program in programs_of(geometry) for size in sizes}
    for key in sorted(wanted):
        _capture(rig, programs, key.program, key.batch_size)
    padded = {padded_batch_size(n, sizes) for n in range(1, geometry.limits.max_num_reqs + 1)}
    if set(programs.state.keys) != wanted or not padded <= set(sizes):
        raise ContractViolation(
            "some captured key is missing from the graph state",
            got=sorted(map(str, programs.state.keys)),
            expected=sorted(map(str, wanted)),
            bug="sglang#40396",
        )
    if not isinstance(programs.state.pool_bytes, int) or programs.state.pool_bytes < 0:
        raise ContractViolation(
            "pool_bytes must be a count of bytes", got=programs.state.pool_bytes, bug="sglang#24453"
        )
    fresh, key = subject.graph_state(geometry), min(wanted)
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
def replays_move_no_buffer(subject: Subject, value: Value) -> None:
    """Arena addresses, and the memory that the backend holds, are the same after capture and after replays."""
    from ..scenarios.held import held_storages

    geometry, program = value
    rig, programs = _open(subject, geometry)
    sizes = geometry.limits.capture_batch_sizes
    copies = {size: _capture(rig, programs, program, size) for size in sizes}
    held, addresses = held_storages(rig.backend), rig.arena.addresses()
    for number, (_, turn) in enumerate(replays(geometry, program)):
        _replay(rig, programs, program, turn, copies[len(turn.requests)], number)
        now = held_storages(rig.backend)
        moved = sorted(name for address, name in now.items() if address not in held)
        if moved or rig.arena.addresses() != addresses:
            raise ContractViolation(
                "memory that a graph uses moved between replays",
                batch=turn,
                got=moved or "arena buffers",
                expected="the addresses of the capture",
                bug="sglang#27664",
            )


def _open(subject: Subject, geometry: Geometry) -> tuple[Any, Programs]:
    from ..scenarios.program import Programs
    from ..scenarios.rig import Rig, pool_pages

    pages = max(
        pool_pages(geometry),
        *(turn.num_pages for program in programs_of(geometry) for _, turn in replays(geometry, program)),
    )
    rig = Rig(subject, geometry, pages)
    return rig, Programs(rig)


def _capture(rig: Any, programs: Programs, program: Program, size: int, what: str = "", short: bool = False) -> Any:
    """Warm up, check, capture, replay once, check: what an engine does at start-up, with eyes open."""
    from ..scenarios.rig import place

    turn = place(rig, captured(rig.geometry, program, size, short))
    loaded = programs.load(turn, host=programs.capture_host)
    rig.arena.poison()
    programs.plan(loaded)
    warm = programs.step(loaded)
    programs.holds(loaded, warm, f"the warm-up before capturing {program.value}[{size}]")
    programs.clear_outputs()
    rig.arena.poison()
    programs.plan(loaded)
    copies = programs.capture(GraphKey(program, size), loaded)
    programs.replay(GraphKey(program, size), loaded)
    programs.holds(loaded, copies, what or f"the first replay of {program.value}[{size}]")
    programs.clear_outputs()
    programs.replay(GraphKey(program, size), loaded)
    programs.holds(loaded, copies, f"the second replay of {program.value}[{size}], with nothing written between")
    return copies


def _replay_all(rig: Any, programs: Programs, geometry: Geometry, program: Program) -> None:
    copies = programs.copies
    for number, (poison, turn) in enumerate(replays(geometry, program)):
        if poison:
            rig.arena.poison()
        _replay(rig, programs, program, turn, copies[GraphKey(program, len(turn.requests))], number)


def _replay(rig: Any, programs: Programs, program: Program, turn: Turn, copies: Any, number: int) -> None:
    from ..scenarios.rig import place

    loaded = programs.load(place(rig, turn), seed=number, host=programs.replay_host(number))
    programs.plan(loaded)
    programs.replay(GraphKey(program, len(turn.requests)), loaded)
    programs.holds(loaded, copies, f"replay {number} of {program.value}[{len(turn.requests)}]")
