"""Items that test captured graphs: replays with new inputs in fixed memory, padded to the captured size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftmark.geometry import AttentionShape, Geometry, Mode

from ...cases.forwards import ForwardCase, uniform
from ...check import Refused
from ...runner.item import Item
from ..driver import Capturable, EngineCapabilities
from ..step import Step, step_of
from ..subject import EngineSubject
from .building import DRAFT, fitted, on_subject
from .numerics import SMALL

RIGHT, EAGER = "graphs.captured_run_is_right", "graphs.replay_equals_eager"
TURNS, ORDER, PADDED = (
    "graphs.programs_do_not_disturb_each_other",
    "graphs.capture_order_does_not_matter",
    "graphs.keys_are_closed_under_padding",
)
SIZES = (1, 4, 8)
SHAPES: dict[str, AttentionShape] = {
    "fp32": SMALL,
    "window": replace(SMALL, window_left=19),
    "bf16-128": replace(SMALL, q_dtype="bfloat16", kv_dtype="bfloat16", head_dim=128, num_qo_heads=8),
    "page128": replace(SMALL, page_size=128),
}


@dataclass(frozen=True)
class Program:
    """A kind of captured graph: `mode` with `rows` rows per request."""

    mode: Mode
    rows: int


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return items that test each program by itself, all programs in alternation, and both orders of capture."""
    found = []
    for name, shape in SHAPES.items():
        geometry = fitted(caps, shape)
        pages = max(one.num_pages for program in _programs(geometry) for one, _ in _rounds(geometry, program))
        for program in _programs(geometry):
            case = f"{name}-{program.mode.value}"
            made: list[tuple[str, Any]] = [(RIGHT, _first), (EAGER, _many), (PADDED, _padded)]
            for rule, body in made:
                found.append(_item(caps, rule, case, geometry, pages, (program,), body))
        if len(_programs(geometry)) > 1:
            found.append(_item(caps, TURNS, name, geometry, pages, _programs(geometry), _in_turn))
        found.append(_item(caps, ORDER, name, geometry, pages, _programs(geometry), _smallest_first))
    return found


class Graphs:
    """Captures the given programs on one layer in each size, and replays them."""

    def __init__(self, subject: EngineSubject, programs: Sequence[Program], sizes: Sequence[int] = SIZES[::-1]) -> None:
        self.subject = subject
        self._graphs = {(one, size): subject.driver.capture(one.rows, size) for size in sizes for one in programs}

    def assert_replay(self, program: Program, forward: ForwardCase, size: int, seed: int, loose: int = 0) -> None:
        """Replay a batch padded to `size` requests, and check the result as `EngineSubject.assert_step` does."""
        graph = self._graphs[program, size]
        step = step_of(forward, self.subject.caps.trees, padding=size - forward.live, loose=loose)

        def replay(step: Step, *rows: Any) -> Any:
            return self.subject.driver.replay(graph, step, *rows)

        self.subject.assert_step(step, replay, seed=seed, what=f"the output of a replay for {size} requests")


def _item(
    caps: EngineCapabilities,
    rule: str,
    case: str,
    geometry: Geometry,
    pages: int,
    programs: Sequence[Program],
    body: Any,
) -> Item:
    def run(subject: EngineSubject) -> None:
        served = [one for one in programs if _served(subject.driver.capturable, one)]
        if not served or (body is _in_turn and len(served) < 2):
            names = ", ".join(one.mode.value for one in programs)
            raise Refused(f"full graphs of {names}: the backend declares {subject.driver.capturable.name}")
        body(subject, served)

    return on_subject(caps, rule, case, geometry, pages, run)


def _served(declared: Capturable, program: Program) -> bool:
    return declared >= (Capturable.ONE_ROW if program.rows == 1 else Capturable.UNIFORM)


def _programs(geometry: Geometry) -> list[Program]:
    rows = {Mode.DECODE: 1, Mode.VERIFY: DRAFT.num_draft_tokens}
    return [Program(mode, n) for mode, n in rows.items() if mode in geometry.modes]


def _rounds(geometry: Geometry, program: Program) -> list[tuple[ForwardCase, int]]:
    """Return (batch, size that it is padded to) for the sizes 8 → 4 → 8 → 1 → 8 → 4 → 8 → 8, long and short in turn."""
    wall, page = geometry.limits.max_context_len - DRAFT.num_draft_tokens, geometry.attention.page_size
    plans = [
        ((wall, 1, wall - 1, 7, 40, 133), 8),
        ((3, 0, page), 4),
        ((1, 2, 0), 8),
        ((page + 1,), 1),
        ((wall, 129, 250, 1, 64, wall - 1), 8),
        ((wall,), 4),
        ((wall - 1, wall), 8),
        ((5,), 8),
    ]
    return [
        (uniform(f"{program.mode.value}-round{n}", geometry, program.mode, lens, len(lens), tree="chain", seed=n), size)
        for n, (lens, size) in enumerate(plans)
    ]


def _first(subject: EngineSubject, programs: Sequence[Program]) -> None:
    """Replay the same batch twice directly after the capture."""
    graphs, (program,) = Graphs(subject, programs), programs
    forward, size = _rounds(subject.geometry, program)[0]
    for _ in range(2):
        graphs.assert_replay(program, forward, size, 0)


def _many(subject: EngineSubject, programs: Sequence[Program]) -> None:
    graphs, (program,) = Graphs(subject, programs), programs
    for number, (forward, size) in enumerate(_rounds(subject.geometry, program)):
        graphs.assert_replay(program, forward, size, number, loose=number % 3 * 20)


def _padded(subject: EngineSubject, programs: Sequence[Program]) -> None:
    """Replay batches with every number of live requests from one to the captured size, in each captured size."""
    graphs, (program,) = Graphs(subject, programs), programs
    most = subject.geometry.limits.max_num_reqs
    for live in range(1, most + 1):
        lens = [37 * n % 200 for n in range(live)]
        forward = uniform(f"{program.mode.value}-{live}", subject.geometry, program.mode, lens, live, tree="chain")
        for size in (one for one in SIZES if one >= live):
            graphs.assert_replay(program, forward, size, live)


def _in_turn(subject: EngineSubject, programs: Sequence[Program]) -> None:
    graphs = Graphs(subject, programs)
    rounds = [_rounds(subject.geometry, program) for program in programs]
    for number, turn in enumerate(zip(*rounds, strict=True)):
        for program, (forward, size) in zip(programs, turn, strict=True):
            graphs.assert_replay(program, forward, size, number)
        forward = turn[0][0]
        subject.assert_step(
            step_of(forward, subject.caps.trees), seed=number, what="the output of an eager step between replays"
        )


def _smallest_first(subject: EngineSubject, programs: Sequence[Program]) -> None:
    graphs = Graphs(subject, programs, sizes=SIZES)
    for program in programs:
        for number, (forward, size) in enumerate(_rounds(subject.geometry, program)):
            graphs.assert_replay(program, forward, size, number)
