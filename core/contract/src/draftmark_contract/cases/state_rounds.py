"""Sequences of rounds over recurrent state, as an engine makes them. No torch.

Requests keep their slots while they join, are preempted and resumed, move, are rewound and leave. A drawn list of small
numbers is a sequence, so a shrunk list is a simpler sequence.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from draftmark.geometry import Mode, StateGeometry
from draftmark.graphs import Program, padded_batch_size

from ..oracle.formulas import checkpoint, max_budget
from ..oracle.history import NO_PARENT
from .forwards import TRAPS, ForwardCase
from .state import Choice, any_leaf, decode, extend, verify, verify_rows

Draw = tuple[int, ...]
"""(action, a, b, c)."""
TREES = ("chain", "random", "star", "deep", "unused")
NULL = 0
"""The null slot."""


@dataclass
class Row:
    """A running request: its committed tokens, its slot, its lent spare slot, and its checkpoints (length, slot)."""

    length: int
    slot: int
    spare: int = NULL
    kept: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Round:
    """One forward of a sequence, and how to run it.

    Attributes:
        forward: the forward.
        program: graph to replay; None for an eager forward.
        copies: copies of slots before the forward, one after another. The pairs (source, target) of one are read first.
        commits: False for a round that is rewound: its rows run, and it is never committed.
        moved: changes of requests before the forward, as text.
        junk: kind of contents of all slots before the first round of a sequence.
    """

    forward: ForwardCase
    program: Program | None = None
    copies: tuple[tuple[tuple[int, int], ...], ...] = ()
    commits: bool = True
    moved: str = ""
    junk: int = 0

    def without_saves(self) -> Round:
        """Return the round without lent slots. Requests that would resume from a checkpoint find it empty."""
        requests = tuple(replace(one, save=NULL) for one in self.forward.requests)
        return replace(self, forward=replace(self.forward, requests=requests))

    @property
    def geometry(self) -> StateGeometry:
        """Geometry of the forward."""
        assert isinstance(self.forward.geometry, StateGeometry)
        return self.forward.geometry

    @property
    def num_pages(self) -> int:
        """Slots that the pool must have."""
        return self.forward.num_pages

    def __str__(self) -> str:
        one = self.forward
        how = "eager" if self.program is None else f"replay of {self.program.value}"
        live = ", ".join(f"slot {r.pages[0]} L={r.prefix}+{r.rows} accepts {_count(r)}" for r in one.requests if r.live)
        said = [self.moved] * bool(self.moved) + [f"copies {list(self.copies)}"] * bool(self.copies)
        said += [f"{one.mode.value}, {how}, {one.live} live of {len(one.requests)} ({live})"]
        return "; ".join(said + ["not committed"] * (not self.commits))


class StateEngine:
    """Makes the rounds of a simulated engine on the slots of one pool.

    Attributes:
        rows: the running requests.
        num_slots: slots of the pool, the null slot and slots that no request ever owns included.
    """

    def __init__(self, geometry: StateGeometry, captures: bool = False) -> None:
        most = geometry.limits.max_num_reqs
        self.geometry, self.captures = geometry, captures
        # A request has its slot, a spare one and a checkpoint. Two more slots let requests move.
        self.num_slots = 1 + 3 * most + 2 + TRAPS
        self.free = list(range(1, self.num_slots - TRAPS))
        random.Random("slots").shuffle(self.free)
        self.rows: list[Row] = []
        self._copies: list[tuple[tuple[int, int], ...]] = []
        self._said: list[str] = []
        self._number = 0

    # -- requests -----------------------------------------------------------------------------------------

    def join(self, count: int = 1) -> None:
        """Add requests without tokens. A new slot holds whatever its last owner left."""
        for _ in range(min(count, self.geometry.limits.max_num_reqs - len(self.rows))):
            self.rows.append(Row(0, self.free.pop()))
            self._said.append(f"slot {self.rows[-1].slot} joins")

    def leave(self, n: int) -> None:
        """End a request. Its slots are given out next."""
        row = self.rows.pop(n)
        self.free += [row.slot, *[row.spare] * (row.spare != NULL), *(slot for _, slot in row.kept)]
        self._said.append(f"slot {row.slot} leaves")

    def preempt(self, n: int) -> None:
        """Take a request's slot, and resume it from its last checkpoint, or from the start, on another slot."""
        row = self.rows[n]
        length, source = row.kept[-1] if row.kept else (0, NULL)
        slot = self.free.pop(0)
        if length:
            self._copies.append(((source, slot),))
        self.free.append(row.slot)
        self._said.append(f"slot {row.slot} is preempted and resumes at {length} on slot {slot}")
        row.length, row.slot = length, slot

    def move(self, n: int) -> None:
        """Move a request to another slot."""
        row, slot = self.rows[n], self.free.pop(0)
        self._copies.append(((row.slot, slot),))
        self.free.append(row.slot)
        row.slot = slot

    def swap(self, n: int, other: int) -> None:
        """Exchange the slots of two requests, contents included."""
        one, two = self.rows[n], self.rows[other]
        if one is not two:
            self._copies.append(((one.slot, two.slot), (two.slot, one.slot)))
            one.slot, two.slot = two.slot, one.slot

    # -- rounds -------------------------------------------------------------------------------------------

    def extend(self, rows: Sequence[int], padded: int = 0) -> Round:
        """Make an EXTEND of the first requests."""
        live = self.rows[: len(rows)]
        wall, left, kept = self.geometry.limits.max_context_len, self.geometry.limits.max_extend_tokens, []
        for row, count in zip(live, rows, strict=True):
            kept.append(max(0, min(count, wall - row.length, left)))
            left -= kept[-1]
        if not sum(kept):
            return self.decode()
        return self._made(extend(self.geometry, self._lengths(live), kept, padded), live)

    def decode(self, padded: int | None = None) -> Round:
        """Make a DECODE of all requests."""
        return self._made(decode(self.geometry, self._lengths(self.rows), self._size(padded)), self.rows)

    def verify(self, tree: str, choice: Choice, padded: int | None = None, commits: bool = True) -> Round:
        """Make a VERIFY of all requests."""
        tree = "chain" if self.geometry.draft.topk == 1 else tree
        size = self._size(padded)
        kind = "deep" if tree == "chain" and self.captures and self.geometry.draft.topk > 1 else tree
        made = verify(self.geometry, self._lengths(self.rows), tree=kind, padded=size, seed=self._number, choice=choice)
        return self._made(made, self.rows, commits)

    def verify_rows(
        self, rows: Sequence[int], tree: str, choice: Choice, budget: int | None = None, commits: bool = True
    ) -> Round:
        """Make a RAGGED_VERIFY of the first requests."""
        tree = "chain" if self.geometry.draft.topk == 1 else tree
        kind = "deep" if tree == "chain" and self.captures and self.geometry.draft.topk > 1 else tree
        most, counts = budget or max_budget(self.geometry), list[int]()
        for count in rows[: len(self.rows)]:
            counts.append(min(count, most - sum(counts)))
        live = self.rows[: len(counts)]
        made = verify_rows(
            self.geometry, self._lengths(live), counts, tree=kind, budget=most, seed=self._number, choice=choice
        )
        # The bounds of a graph's batches are those of its capture.
        return self._made(replace(made, bounds=()) if self.captures else made, live, commits)

    def _size(self, padded: int | None) -> int:
        return max(1, len(self.rows)) if padded is None else padded

    @staticmethod
    def _lengths(rows: Sequence[Row]) -> tuple[int, ...]:
        return tuple(row.length for row in rows)

    def _made(self, forward: ForwardCase, live: Sequence[Row], commits: bool = True) -> Round:
        """Place the forward on the slots of its requests, lend spare slots, and count the tokens."""
        self._number += 1
        interval, requests = self.geometry.limits.state_interval, list(forward.requests)
        for n, row in enumerate(live):
            if interval and row.spare == NULL and (n + self._number) % 4 and len(self.free) > 2:
                row.spare = self.free.pop()
            requests[n] = replace(requests[n], pages=(row.slot,), save=row.spare)
        made = replace(forward, requests=tuple(requests), num_pages=self.num_slots)
        if commits:
            for row, one in zip(live, requests, strict=False):
                self._count(
                    row, _count(one) if forward.mode in (Mode.VERIFY, Mode.RAGGED_VERIFY) else one.rows, forward.mode
                )
        found = Round(made, copies=tuple(self._copies), commits=commits, moved=", ".join(self._said))
        self._copies, self._said = [], []
        return found

    def _count(self, row: Row, count: int, mode: Mode) -> None:
        interval, end = self.geometry.limits.state_interval, row.length + count
        at = checkpoint(row.length, count, interval) if interval else 0
        saved = at > row.length and (mode in (Mode.VERIFY, Mode.RAGGED_VERIFY) or at == end)
        if saved and row.spare != NULL:
            row.kept.append((at, row.spare))
            row.spare = NULL
            if len(row.kept) > 1:
                self.free.append(row.kept.pop(0)[1])
        row.length = end

    # -- drawn sequences ----------------------------------------------------------------------------------

    def rounds(self, draws: Sequence[Draw]) -> list[Round]:
        """Return the rounds of a drawn sequence."""
        found = []
        for action, *numbers in draws:
            made = self._drawn(action, *numbers)
            if made is not None:
                found.append(made)
        return found

    def _drawn(self, action: int, a: int, b: int, c: int) -> Round | None:
        kinds: list[Callable[[int, int, int], Round | None]] = [
            *(self._draw_verify, self._draw_rows, self._draw_extend, self._draw_decode, self._draw_rows),
            *(self._draw_verify, self._draw_requests, self._draw_rewound, self._draw_slots),
        ]
        if not self.rows:
            self.join(1 + a % self.geometry.limits.max_num_reqs)
        while self.rows and any(self._full(row) for row in self.rows):
            self.leave(next(n for n, row in enumerate(self.rows) if self._full(row)))
        if not self.rows:
            self.join()
        return kinds[action % len(kinds)](a, b, c)

    def _full(self, row: Row) -> bool:
        return row.length + self.geometry.draft.num_draft_tokens > self.geometry.limits.max_context_len

    def _program(self, program: Program, b: int) -> tuple[Program | None, int | None]:
        size = padded_batch_size(max(1, len(self.rows)), self.geometry.limits.capture_batch_sizes)
        if size is None or not self.captures or b % 3 == 0:
            return None, None
        return program, size

    def _draw_verify(self, a: int, b: int, c: int, commits: bool = True) -> Round:
        program, size = self._program(Program.VERIFY, b)
        made = self.verify(TREES[a % len(TREES)], any_leaf(c), size, commits)
        return replace(made, program=program if commits else None)

    def _draw_rows(self, a: int, b: int, c: int) -> Round:
        most, budgets = self.geometry.draft.num_draft_tokens, self.geometry.limits.row_budgets
        rows = [(a + c * n + row.length) % (most + 1) for n, row in enumerate(self.rows)]
        program = Program.RAGGED_VERIFY if self.captures and b % 3 else None
        budget = budgets[b % len(budgets)]
        made = self.verify_rows(rows[:budget], TREES[a % len(TREES)], any_leaf(c), budget)
        return replace(made, program=program)

    def _draw_extend(self, a: int, b: int, c: int) -> Round:
        self.join(b % 3)
        count = 1 + a % len(self.rows)
        if c % 2:
            self.rows = self.rows[-count:] + self.rows[:-count]
        return self.extend([(1, 7, 3, 16, 2, 30)[(a + b * n) % 6] for n in range(count)], padded=c % 3 == 2)

    def _draw_decode(self, a: int, b: int, c: int) -> Round:
        program, size = self._program(Program.DECODE, b)
        return replace(self.decode(size), program=program)

    def _draw_requests(self, a: int, b: int, c: int) -> None:
        if a % 3 == 0:
            self.leave(b % len(self.rows))
        elif a % 3 == 1:
            self.join(1 + b % 2)
        else:
            self.preempt(b % len(self.rows))

    def _draw_rewound(self, a: int, b: int, c: int) -> Round:
        return self._draw_verify(a, b, c, commits=False)

    def _draw_slots(self, a: int, b: int, c: int) -> None:
        if a % 2:
            self.swap(b % len(self.rows), c % len(self.rows))
        else:
            self.move(b % len(self.rows))


def drawn(dice: random.Random, length: int) -> list[Draw]:
    """Return a random sequence of draws."""
    return [tuple(dice.randrange(60) for _ in range(4)) for _ in range(length)]


def _count(request: object) -> int:
    leaf = getattr(request, "leaf", NO_PARENT)
    return 0 if leaf == NO_PARENT else len(request.lineage(leaf))  # type: ignore[attr-defined]
