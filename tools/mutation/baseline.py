"""Runs the suite on the unchanged copy: the outcome and CPU time of each item, and the statements that it reaches.

A mutant runs only on items that reach its statement, because a change elsewhere cannot alter the others.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from . import suite
from .copies import load_copy
from .reach import Reach
from .targets import Target


@dataclass(frozen=True)
class Known:
    """Result of one item on the unchanged copy.

    Attributes:
        outcome: see `suite.Verdict`.
        seconds: CPU time.
        reached: (module, statement number) of every statement that ran.
    """

    outcome: str
    seconds: float
    reached: frozenset[tuple[str, int]] = field(repr=False)


Baseline = dict[str, Known]


def measure(target: Target, path: Path, items: Iterable[str], started: Callable[[str], None]) -> Baseline:
    """Run the items and write the results to `path`. Call it in a process of its own.

    Args:
        started: called with each item's id before it runs.

    Raises:
        AssertionError: an item fails on the unchanged copy, so it cannot judge a mutant.
    """
    reach = Reach(target.modules)
    backend = load_copy(target, reach.change)
    at_load = frozenset(reach.seen)  # statements that run at import count as reached by every item
    found: Baseline = {}
    for item in items:
        started(item)
        reach.clear()
        start = time.process_time()
        verdict = suite.verdict(backend, item)
        assert not verdict.failed, f"the unchanged copy of {target.package} fails {item}: {verdict.message}"
        found[item] = Known(verdict.outcome, round(time.process_time() - start, 4), at_load | reach.seen)
    path.write_text(json.dumps({item: [one.outcome, one.seconds, sorted(one.reached)] for item, one in found.items()}))
    return found


def read(path: Path) -> Baseline:
    """Return the results that `measure` wrote."""
    rows = json.loads(path.read_text())
    return {
        item: Known(outcome, seconds, frozenset((module, number) for module, number in reached))
        for item, (outcome, seconds, reached) in rows.items()
    }
