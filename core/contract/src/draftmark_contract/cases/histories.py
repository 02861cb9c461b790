"""Builds sequences of forwards like an engine's from random numbers. Any number is valid; 0 is the simplest step.

Requests join, grow, leave, wait without pages, and return on other pages. Each step is a `ForwardCase` on the pages
that its requests have at that time, in any mode and engine form. An engine also sleeps, which drops its graphs, and
some forwards and captures fail. A list of small numbers is therefore a sequence, and a shrunk list is a simpler
sequence. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from draftmark.geometry import (
    Form,
    Geometry,
    Mode,
)
from draftmark.graphs import Program, padded_batch_size

from ..oracle.formulas import draft_steps, max_pages, max_prefix, max_requests, pages, rows_and_tail
from ..oracle.history import Request, chain
from .forwards import TRAPS, ForwardCase, block_masks, device_tree
from .graph_rounds import MODES, programs_of
from .trees import beams, verify_tree

Draw = tuple[int, ...]
"""(action, a, b, c, d) and perhaps e. An action uses the numbers that it needs, modulo the number of its choices."""
ACTIONS = 12
"""Number of actions of `Engine`. The last three repeat, fail and sleep."""
SEED = "DRAFTMARK_CONTRACT_SEED"
"""Environment variable with the seed of all drawn sequences."""
TREES = ("chain", "random", "star", "deep", "unused")
KV_LAYOUTS = 4
"""Layouts of strided KV that a step may have: the first ones of `harness.tensor_forms.KV_FORMS`."""
CALLS = ("plan", "write_metadata", "write_kv", "attend")
"""Calls of one forward, in order."""
HOSTS = ("exact", "tight_bound", "upper_bound", "unknown")
TOTALS = (8, 12, 20)
"""Total rows of an EXTEND. There are few values, so that splits differ more often than totals."""


@dataclass(frozen=True)
class Failure:
    """States where a forward fails: an engine's own error after a call, or an error in the call.

    Attributes:
        call: index of the call in `CALLS`.
        operator: number of torch operators of that call that run before one of them raises; None to finish the call.
        refused: True if attend receives sinks that contradict the geometry, which a backend refuses.
    """

    call: int
    operator: int | None = None
    refused: bool = False

    def __str__(self) -> str:
        if self.refused:
            return "is refused in attend, because its sinks contradict the geometry"
        where = "after" if self.operator is None else f"at operator {self.operator} of"
        return f"raises {where} {CALLS[self.call]}"


@dataclass(frozen=True)
class Step:
    """Holds one forward of a sequence, and how to run it.

    Attributes:
        forward: the forward to run.
        program: graph to replay, or None for an eager forward.
        host: kind of host lengths.
        poison: True to overwrite the arena before the step.
        moved: changes of requests and pages since the previous step, as text for messages.
        table, kv: index of the layout of an engine's page table and of strided KV.
        shared: True if a second layer then attends to the same KV with other queries.
        failure: an eager forward fails there and is dropped; a capture fails there and is repeated. None: no failure.
        sleeps: True if the engine drops all graphs before this step.
    """

    forward: ForwardCase
    program: Program | None
    host: str
    poison: bool
    moved: str = ""
    table: int = 0
    kv: int = 0
    shared: bool = False
    failure: Failure | None = None
    sleeps: bool = False

    def __str__(self) -> str:
        one = self.forward
        live = ", ".join(f"L={r.prefix}+{r.rows}" for r in one.requests if r.live)
        how = "eager" if self.program is None else f"replay of {self.program.value}"
        tail = f" step {one.step}" if one.mode is Mode.DRAFT else ""
        moved = f"{self.moved}; " if self.moved else ""
        said = (
            f"{moved}{one.mode.value}{tail}, {how}, {one.live} live of {len(one.requests)} ({live}), host {self.host}"
        )
        return ", ".join([said, *self._details()])

    def _details(self) -> list[str]:
        """Return the parts of the step that most steps do not have."""
        one, forms = self.forward, self.forward.geometry.forms
        found = [f"budget {one.budget}"] * bool(one.budget) + [f"row bounds {one.bounds}"] * bool(one.bounds)
        found += [f"table layout {self.table}"] * (Form.ENGINE_TABLE in forms)
        found += [f"KV layout {self.kv}"] * (Form.STRIDED_KV in forms)
        found += [f"{len(one.unstored)} rows with slot -1"] * bool(one.unstored) + ["without write_kv"] * one.shares_kv
        found += ["then a layer that shares its KV"] * self.shared + ["after a sleep"] * self.sleeps
        return found + ([str(self.failure)] if self.failure else [])


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
        self._drawn: tuple[int, int, int] | None = None
        self._sleeps = False

    def steps(self, draws: Sequence[Draw]) -> list[Step]:
        """Return the forwards of a sequence. `moved` of a forward lists the changes of requests before it."""
        actions: list[Callable[[Draw], Step | None]] = [
            *(self._round, self._extend, self._round, self._extend_again, self._other_mode),
            *(self._leave, self._wait, self._jump, self._move),
            *(self._same_bounds, self._fail, self._sleep),
        ]
        found = []
        for action, *numbers in draws:
            four, e = tuple(numbers[:4]), (*numbers, 0)[4]
            step = actions[action % len(actions)](four)
            if step is not None:
                found.append(replace(_in_forms(step, e), moved=", ".join(self._moved), sleeps=self._sleeps))
                self._moved, self._sleeps = [], False
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

    def _same_bounds(self, draw: Draw) -> Step:
        """Repeat the last round on the same host numbers, but with other rows, lengths or trees on the device."""
        a, c, d = self._drawn or (draw[0], draw[2], draw[3])
        step = self._uniform(a, self._rows, c, d + 1 + draw[3], advance=True)
        return replace(step, host="unknown", forward=replace(step.forward, bounds=()))

    def _fail(self, draw: Draw) -> Step:
        """Make a forward that fails in one of its calls. A capture that fails is repeated."""
        step = self._uniform(draw[0], self._rows, draw[2], draw[3], advance=False)
        return replace(step, failure=Failure(draw[1] % len(CALLS), None if draw[1] % 3 == 0 else draw[1] // 2))

    def _uniform(self, a: int, live: list[Row], c: int, d: int, advance: bool) -> Step:
        geometry, steps = self.geometry, draft_steps(self.geometry)
        self._drawn = (a, c, d)
        modes = [mode for mode in geometry.modes if mode is not Mode.EXTEND and (mode is not Mode.DRAFT or steps)]
        mode = modes[a % len(modes)]
        if mode is Mode.RAGGED_VERIFY:
            return self._of_the_device(live, c, d, advance)
        size = padded_batch_size(max(1, len(live)), geometry.limits.capture_batch_sizes)
        program = None if size is None or c % 3 == 0 else {MODES[one]: one for one in programs_of(geometry)}[mode]
        padded = max(1, len(live)) if size is None or c % 3 == 0 else size
        step = (steps - 1 if program else c % steps) if mode is Mode.DRAFT else 0
        rows, tail = rows_and_tail(geometry, mode, step)
        tree = TREES[d % len(TREES)]
        # A graph's batch has a mask whenever the geometry drafts trees, even if this batch's tree is a chain.
        causal = mode in (Mode.DECODE, Mode.DRAFT_EXTEND, Mode.DRAFT_BLOCK)
        causal |= mode is Mode.VERIFY and tree == "chain" and not program
        masks = block_masks(mode, tail)
        requests = []
        for n, row in enumerate(live):
            drafted = beams(geometry.draft.topk, step, d + n) if mode is Mode.DRAFT else verify_tree(tree, rows, d + n)
            made = self._request(row, chain(tail) if causal else drafted, rows)
            requests.append(replace(made, masks=masks))
        requests += [Request(0, (), chain(tail), rows, live=False)] * (padded - len(live))
        for n, row in enumerate(live if advance and mode is not Mode.DRAFT else []):
            row.length = min(row.length + 1 + (d + n) % rows, max_prefix(geometry))
        return self._step(mode, step, requests, causal, program, d)

    def _of_the_device(self, live: list[Row], c: int, d: int, advance: bool) -> Step:
        """Make a RAGGED_VERIFY of some running requests with other row counts each time: eager or a replay."""
        geometry, most = self.geometry, self.geometry.draft.num_draft_tokens
        budgets, tree = geometry.limits.row_budgets, TREES[d % len(TREES)]
        program = Program.RAGGED_VERIFY if c % 3 and geometry.limits.capture_batch_sizes else None
        # Eager batches often have the size of a batch in another mode: a plan that is kept by size then shows.
        sizes = budgets if program else (*budgets, *(max(1, len(live)) * q for q in (1, most, most)))
        budget = min(sizes[(c + d) % len(sizes)], budgets[-1])
        room = min(max_requests(geometry), budget)
        live = live[:room]
        counts: list[int] = []
        for n, row in enumerate(live):
            counts.append(min((d + c * n + row.length) % (most + 1), budget - sum(counts)))
        kind = "deep" if tree == "chain" and program else tree
        requests = [self._request(row, device_tree(kind, q, d), q) for row, q in zip(live, counts, strict=True)]
        padded = room - len(live) if program or d % 4 == 3 else not live
        requests += [Request(0, (), (), 0, live=False)] * padded
        for row, count in zip(live if advance else [], counts, strict=False):
            row.length = min(row.length + min(count, 1 + d % most), max_prefix(geometry))
        step = self._step(Mode.RAGGED_VERIFY, 0, requests, tree == "chain" and not program, program, d)
        bounds = ((), tuple(counts), tuple(min(most, q + 1) for q in counts), ())[c % 4]
        return replace(step, forward=replace(step.forward, budget=budget, bounds=bounds))

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

    # -- draws that change requests or graphs between forwards --------------------------------------------

    def _sleep(self, draw: Draw) -> None:
        """Drop all graphs. The next replay of each graph needs a new capture, in a new graph state."""
        self._sleeps = True

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


def drawn(
    dice: random.Random, length: int, actions: int = ACTIONS, numbers: Sequence[int] = (12, 12, 12, 12, 96)
) -> list[Draw]:
    """Return the random numbers of a sequence of the first `actions` actions. `numbers` are the numbers of values."""
    return [(dice.randrange(actions), *map(dice.randrange, numbers)) for _ in range(length)]


def _in_forms(step: Step, e: int) -> Step:
    """Return a step in which an engine's forms and layers are drawn from one number; 0 is the plain form."""
    forward, stores = step.forward, e // 12 % 4
    rows = forward.rows[: forward.live_rows]
    if Form.ENGINE_SLOTS in forward.geometry.forms and stores in (1, 2):
        forward = replace(forward, unstored=frozenset(rows[e % 2 :: 3] if stores == 1 else rows))
    if stores == 3 and step.program is None:
        forward = replace(forward, shares_kv=True)
    return replace(
        step, forward=forward, table=e % 4, kv=e // 4 % KV_LAYOUTS, shared=e // 48 % 2 == 1 and step.program is None
    )


def _split(total: int, count: int, c: int) -> list[int]:
    """Split `total` rows over `count` requests: evenly, or with most rows in one request."""
    if c % 3 == 0:
        return [total // count + (n < total % count) for n in range(count)]
    rows = [1] * count
    rows[c % count] += total - count
    return rows
