"""One mutant before the items, in a process of its own, until one of them fails."""

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
"""Exit code of a process whose item took too much CPU time."""
LEAST_S, TIMES = 10.0, 20.0
"""CPU time that one item may take: so much, and so many times what it takes on the unchanged copy."""
SHOWN = 300


class Status(StrEnum):
    """How a mutant ended."""

    KILLED = "killed"
    """An item fails."""
    HUNG = "hung"
    """An item takes far too long, or the process ends in it; `draftmark contract` fails such an item."""
    STILLBORN = "stillborn"
    """The copy cannot be imported or is no backend: Python or the core notices, and the suite need not."""
    NARROWER = "narrower"
    """Nothing fails, but items end otherwise than on the original: refused, or not judged by its kernels. The verdict
    says so."""
    UNREACHED = "unreached"
    """No item runs the statement. Survives."""
    SURVIVED = "survived"
    """Every item that runs the statement ends as on the original."""


@dataclass(frozen=True)
class Ended:
    """How one mutant ended.

    Attributes:
        mutation: its id.
        item: the item that killed it, or in which it hung.
        message: of that item, cut short.
        changed: for a survivor, ``"passed → refused"`` → items that end otherwise than on the original.
        met: items that it met. of: items that reach its statement.
        sample: cases of each check that it was to meet, 0 for all.
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
        """Whether more items could not change the word: it failed one, or met them all."""
        return self.status not in (Status.SURVIVED, Status.NARROWER) or self.met == self.of

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Ended:
        """The inverse of `as_json`."""
        return cls(**{**row, "status": Status(row["status"])})


def judge(
    target: Target, mutation: Mutation, order: Sequence[str], baseline: Baseline, started: Callable[[str], None]
) -> Ended:
    """Load the mutant and show it to the items in this order; `started` is told of each before it runs."""
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
    """End this process after so much CPU time, or after one item's, whatever it is doing."""

    def overrun(signum: int, frame: FrameType | None) -> None:
        os._exit(HUNG)

    signal.signal(signal.SIGPROF, overrun)
    whole = int(seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole, whole))
