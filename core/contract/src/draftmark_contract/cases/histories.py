"""Builds sequences of forwards like an engine's from random numbers. Any number is valid; 0 is the simplest step.

Requests join, grow, leave, wait without pages, and return on other pages. Each step is a `ForwardCase` on the pages
that its requests have at that time. A list of small numbers is therefore a sequence, and a shrunk list is a simpler
sequence. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from draftmark.geometry import CORE_MODES, DRAFT_MODES, TARGET_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.graphs import Program, padded_batch_size

from ..oracle.formulas import draft_steps, max_pages, max_prefix, max_requests, pages, rows_and_tail
from ..oracle.history import Request, chain
from .forwards import TRAPS, ForwardCase
from .geometries import PAGE128, PAGE128_TREE, SMALL, TREE, mandatory
from .graph_rounds import MODES, programs_of
from .trees import beams, verify_tree

Draw = tuple[int, ...]
"""(action, a, b, c, d), all small. An action uses the numbers that it needs, modulo the number of its choices."""
SEED = "DRAFTMARK_CONTRACT_SEED"
"""Environment variable with the seed of all drawn sequences."""
TREES = ("chain", "random", "star", "deep", "unused")
HOSTS = ("exact", "tight_bound", "upper_bound", "unknown")
TOTALS = (8, 12, 20)
"""Total rows of an EXTEND. There are few values, so that splits differ more often than totals."""


def profiles() -> dict[str, Geometry]:
    """Return the geometries for which random sequences are generated, by name."""
    limits = Limits(max_num_reqs=5, max_context_len=84, max_extend_tokens=40, capture_batch_sizes=(1, 3))
    wide = replace(SMALL, page_size=8, window_left=5, logits_soft_cap=30.0)
    large = replace(limits, max_context_len=300)
    make = Geometry.create
    return {
        "plain": mandatory(),
        "verifying": make(SMALL, limits, TREE, modes=TARGET_MODES),
        "drafting": make(replace(SMALL, page_size=1), replace(limits, overlap=True), TREE, modes=DRAFT_MODES),
        "all": make(replace(SMALL, page_size=4, q_dtype="float32", kv_dtype="float32"), limits, TREE, modes=CORE_MODES),
        "all-window": make(wide, limits, DraftShape(2, 3, 5), modes=CORE_MODES),
        "all-page128": make(PAGE128, large, PAGE128_TREE, modes=CORE_MODES),
        "all-no-graphs": make(
            AttentionShape(6, 2, 64, 16), replace(limits, capture_batch_sizes=()), TREE, modes=CORE_MODES
        ),
    }


@dataclass(frozen=True)
class Step:
    """Holds one forward of a sequence, and how to run it.

    Attributes:
        forward: the forward to run.
        program: graph to replay, or None for an eager forward.
        host: kind of host lengths.
        poison: True to overwrite the arena before the step.
        moved: changes of requests and pages since the previous step, as text for messages.
    """

    forward: ForwardCase
    program: Program | None
    host: str
    poison: bool
    moved: str = ""

    def __str__(self) -> str:
        one = self.forward
        live = ", ".join(f"L={r.prefix}+{r.rows}" for r in one.requests if r.live)
        how = "eager" if self.program is None else f"replay of {self.program.value}"
        tail = f" step {one.step}" if one.mode is Mode.DRAFT else ""
        moved = f"{self.moved}; " if self.moved else ""
        return (
            f"{moved}{one.mode.value}{tail}, {how}, {one.live} live of {len(one.requests)} ({live}), host {self.host}"
        )


@dataclass
class Row:
    """A running request: its committed tokens and its pages. A preempted request has no pages."""

    length: int
    pages: list[int] = field(default_factory=list)


class Engine:
    """Turns random draws into steps of a simulated engine. A request owns its pages from their first use on."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        most = max_requests(geometry) * max_pages(geometry)
        self.num_pages = 1 + most + TRAPS
        self._free = list(range(1, 1 + most))
        self._rows: list[Row] = []
        self._moved: list[str] = []
        self._last: tuple[list[Row], list[int]] = ([], [])

    def steps(self, draws: Sequence[Draw]) -> list[Step]:
        """Return the forwards of a sequence. `moved` of a forward lists the changes of requests before it."""
        actions: list[Callable[[Draw], Step | None]] = [
            *(self._round, self._extend, self._round, self._extend_again, self._other_mode),
            *(self._leave, self._wait, self._jump, self._move),
        ]
        found = []
        for action, *numbers in draws:
            step = actions[action % len(actions)](tuple(numbers))
            if step is not None:
                found.append(replace(step, moved=", ".join(self._moved)))
                self._moved = []
        return found

    # -- draws that run a forward -------------------------------------------------------------------------

    def _extend(self, draw: Draw) -> Step | None:
        """Make a ragged prefill (EXTEND) of new and running requests, or None if no request can be extended."""
        a, b, c, d = draw
        count = 1 + a % min(4, self.geometry.limits.max_num_reqs)
        while len(self._rows) < count:
            self._rows.append(Row(0))
        chosen = self._rows[-count:] if c % 2 else self._rows[:count]
        return self._extended(chosen, _split(TOTALS[b % len(TOTALS)], count, c), d)

    def _extend_again(self, draw: Draw) -> Step | None:
        """Repeat the last EXTEND with the same requests and total of rows, but with the rows split differently."""
        chosen, rows = self._last
        if len(chosen) < 2 or any(row not in self._rows for row in chosen):
            return self._extend(draw)
        shift = 1 + draw[0] % (len(rows) - 1)
        return self._extended(chosen, rows[shift:] + rows[:shift], draw[3])

    def _extended(self, chosen: list[Row], rows: list[int], d: int) -> Step | None:
        wall = self.geometry.limits.max_context_len
        fit = [(row, min(n, wall - row.length)) for row, n in zip(chosen, rows, strict=True) if row.length < wall]
        if not fit:
            return None
        self._last = (chosen, rows)
        requests = [self._request(row, chain(n), n) for row, n in fit]
        requests += [Request(0, (), (), 0, live=False)] * (d % 3 == 2)
        for row, n in fit:
            row.length += n
        return self._step(Mode.EXTEND, 0, requests, True, None, d)

    def _round(self, draw: Draw) -> Step:
        """Make a forward of some running requests with equal row counts: eager, eager with padding, or a replay."""
        a, b, c, d = draw
        count = (b + 1) % (self.geometry.limits.max_num_reqs + 1)
        while len(self._rows) < count:
            self._rows.append(Row((13 * d + 29 * len(self._rows)) % (self.geometry.limits.max_context_len + 1)))
        return self._uniform(a, self._rows[:count], c, d, advance=True)

    def _other_mode(self, draw: Draw) -> Step:
        """Make a forward of all running requests in any mode. Their committed lengths do not change."""
        return self._uniform(draw[0], self._rows, draw[2], draw[3], advance=False)

    def _uniform(self, a: int, live: list[Row], c: int, d: int, advance: bool) -> Step:
        geometry, steps = self.geometry, draft_steps(self.geometry)
        modes = [mode for mode in geometry.modes if mode is not Mode.EXTEND and (mode is not Mode.DRAFT or steps)]
        mode = modes[a % len(modes)]
        size = padded_batch_size(max(1, len(live)), geometry.limits.capture_batch_sizes)
        program = None if size is None or c % 3 == 0 else {MODES[one]: one for one in programs_of(geometry)}[mode]
        padded = max(1, len(live)) if size is None or c % 3 == 0 else size
        step = (steps - 1 if program else c % steps) if mode is Mode.DRAFT else 0
        rows, tail = rows_and_tail(geometry, mode, step)
        tree = TREES[d % len(TREES)]
        # A graph's batch has a mask whenever the geometry drafts trees, even if this batch's tree is a chain.
        causal = mode in (Mode.DECODE, Mode.DRAFT_EXTEND) or (mode is Mode.VERIFY and tree == "chain" and not program)
        requests = []
        for n, row in enumerate(live):
            drafted = beams(geometry.draft.topk, step, d + n) if mode is Mode.DRAFT else verify_tree(tree, rows, d + n)
            requests.append(self._request(row, chain(tail) if causal else drafted, rows))
        requests += [Request(0, (), chain(tail), rows, live=False)] * (padded - len(live))
        for n, row in enumerate(live if advance and mode is not Mode.DRAFT else []):
            row.length = min(row.length + 1 + (d + n) % rows, max_prefix(geometry))
        return self._step(mode, step, requests, causal, program, d)

    def _step(
        self, mode: Mode, step: int, requests: list[Request], causal: bool, program: Program | None, d: int
    ) -> Step:
        size = self.geometry.attention.page_size
        null = [(0,) * max(1, pages(one.tail, size)) for one in requests]
        placed = [one if one.live else replace(one, pages=zeros) for one, zeros in zip(requests, null, strict=True)]
        forward = ForwardCase(mode.value, self.geometry, mode, step, tuple(placed), causal, self.num_pages, 1)
        return Step(forward, program, HOSTS[d % len(HOSTS)], d % 5 == 4)

    def _request(self, row: Row, parents: tuple[int, ...], rows: int) -> Request:
        need = pages(row.length + len(parents), self.geometry.attention.page_size)
        while len(row.pages) < need:
            row.pages.append(self._free.pop())
        return Request(row.length, tuple(row.pages[:need]), parents, rows)

    # -- draws that change requests between forwards ------------------------------------------------------

    def _leave(self, draw: Draw) -> None:
        """End a request. The next request that joins gets the freed pages first."""
        if self._rows:
            row = self._rows.pop(draw[0] % len(self._rows))
            self._give_back(row)
            self._moved.append("a request left")

    def _wait(self, draw: Draw) -> None:
        """Preempt a request: it keeps its tokens, loses its pages, and later gets other pages."""
        if self._rows:
            row = self._rows[draw[0] % len(self._rows)]
            self._give_back(row)
            self._rows.append(self._rows.pop(self._rows.index(row)))
            self._moved.append("a request was preempted")

    def _jump(self, draw: Draw) -> None:
        """Add a request that already has tokens, often near the context limit, as after a prefill elsewhere."""
        wall = max_prefix(self.geometry)
        if len(self._rows) < self.geometry.limits.max_num_reqs:
            self._rows.append(Row(max(0, wall - draw[0] % 9) if draw[1] % 2 == 0 else (draw[0] * 29) % (wall + 1)))
            self._moved.append("a request joined")

    def _move(self, draw: Draw) -> None:
        """Move all requests to other pages."""
        for row in self._rows:
            self._give_back(row)
        turn = draw[0] % max(1, len(self._free))
        self._free = self._free[turn:] + self._free[:turn]
        self._moved.append("all pages moved")

    def _give_back(self, row: Row) -> None:
        self._free += row.pages
        row.pages = []


def _split(total: int, count: int, c: int) -> list[int]:
    """Split `total` rows over `count` requests: evenly, or with most rows in one request."""
    if c % 3 == 0:
        return [total // count + (n < total % count) for n in range(count)]
    rows = [1] * count
    rows[c % count] += total - count
    return rows
