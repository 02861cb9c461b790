"""The suite on the unchanged copy: how each item ends, what it costs, and which statements it reaches.

An item that does not reach a statement ends alike whatever stands there, so a mutant meets only items that reach its.
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
    """One item on the unchanged copy."""

    outcome: str
    seconds: float
    reached: frozenset[tuple[str, int]] = field(repr=False)


Baseline = dict[str, Known]


def measure(target: Target, path: Path, items: Iterable[str], started: Callable[[str], None]) -> Baseline:
    """Run the items and keep the result in `path`. Call it in a process of its own; `started` is told of each item.

    Raises:
        AssertionError: an item fails on the unchanged copy, so that no mutant could be judged by it.
    """
    reach = Reach(target.modules)
    backend = load_copy(target, reach.change)
    at_load = frozenset(reach.seen)  # every item depends on these
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
    """What `measure` kept."""
    rows = json.loads(path.read_text())
    return {
        item: Known(outcome, seconds, frozenset((module, number) for module, number in reached))
        for item, (outcome, seconds, reached) in rows.items()
    }
