"""Builder of verdicts for tests, from chosen outcomes instead of items that really run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from draftmark import Recurrence, load
from draftmark.loaded import LoadedBackend
from draftmark_contract.check import Tier
from draftmark_contract.runner import judging
from draftmark_contract.runner.item import Item, all_items
from draftmark_contract.runner.judging import Suite
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.plugin import PluginSubject
from draftmark_contract.runner.source import source_of
from draftmark_contract.runner.verdict import Verdict

Ending = Callable[[Item], Outcome | Result | None]


def backend(**info: Any) -> LoadedBackend:
    """Return the reference backend with these values in its BackendInfo. It serves every kind of layer."""
    loaded = load("reference")
    loaded.info = replace(loaded.info, **{"recurrences": tuple(Recurrence), **info})
    return loaded


def verdict(ending: Ending = lambda item: None, tier: Tier = Tier.HOST, **info: Any) -> Verdict:
    """Return the verdict of a run up to `tier`; `ending` gives each item's outcome, and None means passed."""
    results, judged = [], backend(**info)
    for item in all_items(tier.includes, backend=judged):
        ended = ending(item) or Outcome.PASSED
        results.append(ended if isinstance(ended, Result) else Result(item.id, item.tier.value, ended, "why"))
    return judge(judged, results)


def judge(judged: LoadedBackend, results: Sequence[Result], error: str = "") -> Verdict:
    """Return the verdict on these results of a backend."""
    return judging.judge(suite(judged), results, error)


def suite(judged: LoadedBackend) -> Suite:
    """Return the items of a backend with everything that its verdict needs, as the runner collects it."""
    subject = PluginSubject(judged)
    parts = subject.opened.parts
    identity = {part.name: part.digest() for part in parts}
    return Suite(subject.opened, subject.items(), subject.left_out, identity, source_of(parts))
