"""Judges one mutant in its own process: runs items on it until one fails."""

from __future__ import annotations

import ast
import os
import resource
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from types import FrameType
from typing import Any

from draftmark.errors import BackendLoadError

from . import suite
from .baseline import Baseline
from .copies import load_copy
from .mutation import Mutation
from .targets import Target

HUNG = 86
"""Exit code of a process with an item that exceeded its CPU time."""
LEAST_S, TIMES = 10.0, 20.0
"""CPU time limit of one item: `LEAST_S` seconds plus `TIMES` times its time on the unchanged copy."""
SHOWN = 300


class Status(StrEnum):
    """Possible results of running items on a mutant."""

    KILLED = "killed"
    """An item fails."""
    HUNG = "hung"
    """An item takes far too long, or the process ends in it. `draftmark contract` fails such an item."""
    STILLBORN = "stillborn"
    """The copy cannot be imported or is not a backend. Python or the core rejects it, so the suite need not."""
    NARROWER = "narrower"
    """No item fails, but some end differently than on the original: refused, or not judged by kernels. The verdict
    shows it."""
    UNREACHED = "unreached"
    """No item runs the statement, so the mutant survives."""
    SURVIVED = "survived"
    """Every item that runs the statement ends as on the original."""


@dataclass(frozen=True)
class Ended:
    """Result of one mutant.

    Attributes:
        mutation: id of the mutant.
        status: see `Status`.
        item: the item that killed the mutant, or in which the mutant hung.
        message: message of that item, shortened.
        changed: for a survivor, ``"passed → refused"`` → number of items that end differently than on the original.
        met: number of items (a check on one case) that ran on the mutant.
        of: number of items that reach the mutant's statement.
        sample: number of cases of each check to run, 0 for all.
    """

    mutation: str
    status: Status
    item: str = ""
    message: str = ""
    changed: dict[str, int] = field(default_factory=dict)
    met: int = 0
    of: int = 0
    sample: int = 0

    @property
    def final(self) -> bool:
        """True if more items cannot change the status: an item failed, or all items ran."""
        return self.status not in (Status.SURVIVED, Status.NARROWER) or self.met == self.of

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain JSON types."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Ended:
        """Return the result that `as_json` converted to `row`."""
        return cls(**{**row, "status": Status(row["status"])})


def judge(
    target: Target, mutation: Mutation, order: Sequence[str], baseline: Baseline, started: Callable[[str], None]
) -> Ended:
    """Load the mutant and run the items on it in this order, until one fails.

    Args:
        started: called with each item's id before it runs.
    """
    _limit(30 + 3 * sum(baseline[item].seconds for item in order))

    def change(module: str, tree: ast.Module) -> ast.Module | None:
        return mutation.apply(tree) if module == mutation.module else None

    try:
        backend = load_copy(target, change)
    except BackendLoadError as error:
        return Ended(mutation.id, Status.STILLBORN, message=str(error)[:SHOWN])
    changed: Counter[str] = Counter()
    for met, item in enumerate(order):
        started(item)
        signal.setitimer(signal.ITIMER_PROF, LEAST_S + TIMES * baseline[item].seconds)
        verdict = suite.verdict(backend, item)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if verdict.failed:
            return Ended(mutation.id, Status.KILLED, item, verdict.message[:SHOWN], met=met + 1)
        if verdict.outcome != baseline[item].outcome:
            changed[f"{baseline[item].outcome} → {verdict.outcome}"] += 1
    status = Status.NARROWER if changed else Status.SURVIVED if order else Status.UNREACHED
    return Ended(mutation.id, status, changed=dict(changed), met=len(order))


def _limit(seconds: float) -> None:
    """End this process when it exceeds this CPU time, or when the profiling timer of one item ends."""

    def overrun(signum: int, frame: FrameType | None) -> None:
        os._exit(HUNG)

    signal.signal(signal.SIGPROF, overrun)
    whole = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole))
