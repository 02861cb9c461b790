"""Computes the verdict from the results of a run: counts, served profiles, and scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from draftmark.version import CONTRACT_MAJOR

from ..backend_under_test import INTERPRETED
from ..check import Tier
from ..profiles import Features, Profile, served_in_full, shown_in_core_shape
from .outcome import Counts, Outcome, Result
from .subject import Kind, Listed, Opened
from .verdict import Newer, Scope, Verdict


def judge(suite: Suite, results: Sequence[Result], error: str = "", runs: Sequence[dict[str, Any]] = ()) -> Verdict:
    """Return the verdict on a run's results. `error` is the reason why there is none, as a clause."""
    opened = suite.opened
    results = suite.sort(results)
    due = [result for result in results if result.item in suite.due]
    newer = [result for result in results if result.item not in suite.due]
    total, ran = (Counter(suite.tiers[item] for item in ids) for ids in (suite.due, [one.item for one in due]))
    tiers = tuple(tier.value for tier in Tier if total[tier.value] and ran[tier.value] == total[tier.value])
    verdict = Verdict(
        backend=opened.name,
        kind=opened.kind,
        results=tuple(results),
        items={tier.value: total[tier.value] for tier in Tier},
        tiers_run=tiers,
        counts=Counts.of(due, len(suite.due)),
        minor=opened.minor,
        newer=suite.newer(newer),
        identity=dict(suite.identity),
        source=dict(suite.source),
        info=dict(opened.info),
        facts=dict(opened.facts),
        left_out=dict(suite.left_out) if opened.kind is Kind.LAYER else {},
        known=tuple(dict(one) for one in opened.known),
        unavailable=dict(opened.unavailable),
        error=error,
        runs=tuple(runs),
        listed=tuple(suite.items),
    )
    return replace(verdict, scope=Scope.RULES) if opened.kind is Kind.LAYER else _with_profiles(verdict, suite)


def _with_profiles(verdict: Verdict, suite: Suite) -> Verdict:
    """Return the verdict with its scope, and with the profiles that the plugin serves in full."""
    scope = _scope(suite.opened, verdict.tiers_run)
    met, unmet = _split(verdict.results, scope)
    core = [one for one in unmet if one.item in suite.due and not suite.needs[one.item]]
    # A newer item cannot remove the core profile: the verdict line names the older contract and the newer failures.
    gaps = [suite.needs[one.item] for one in unmet if one.item in suite.due or suite.needs[one.item]]
    # Sizes do not prove that a kernel works. If the host tier ran, only items of later tiers prove a profile.
    showing = [one for one in met if scope is Scope.SIZING or one.tier != Tier.SIZING]
    profiles = served_in_full([suite.needs[one.item] for one in showing], gaps, suite.in_core_shape)
    return replace(
        verdict,
        scope=scope,
        core=dict(Counter(one.outcome.value for one in core)),
        profiles=tuple(profiles) if verdict.complete else (),
        tried=suite.tried([one for one in verdict.results if one.item in suite.due]),
    )


@dataclass(frozen=True)
class Suite:
    """Holds the items of one subject, with the facts that a verdict on their results needs.

    Attributes:
        opened: facts of the subject.
        items: every item, in the suite's order.
        left_out: rules that have no item → the reason.
        identity: digests of the judged code and of the suite.
        source: commit of that code, see `source`.
    """

    opened: Opened
    items: Sequence[Listed] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    identity: Mapping[str, str] = field(default_factory=dict)
    source: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def unopened(cls, name: str) -> Suite:
        """Return the suite of a subject that could not be opened."""
        return cls(Opened(name, Kind.LAYER if ":" in name else Kind.PLUGIN, ""))

    def of_source(self, source: Mapping[str, Any]) -> Suite:
        """Return the suite with another source of the code."""
        return replace(self, source=source)

    @cached_property
    def tiers(self) -> dict[str, str]:
        """Tier of each item."""
        return {one.id: one.tier.value for one in self.items}

    @cached_property
    def needs(self) -> dict[str, Features]:
        """Profiles that each item needs."""
        return {one.id: one.needs for one in self.items}

    @cached_property
    def since(self) -> dict[str, tuple[int, int]]:
        """First contract with each item."""
        return {one.id: one.since for one in self.items}

    @cached_property
    def due(self) -> frozenset[str]:
        """Items of the targeted contract."""
        return frozenset(item for item, since in self.since.items() if since <= (CONTRACT_MAJOR, self.opened.minor))

    @property
    def in_core_shape(self) -> Features:
        """Profiles that have an item in the core's own shape in a tier after the sizing tier."""
        return shown_in_core_shape(needs for item, needs in self.needs.items() if self.tiers[item] != Tier.SIZING)

    def tried(self, results: Sequence[Result]) -> dict[str, tuple[int, int]]:
        """Return, for each profile, the number of items that ran and the number of all targeted items."""
        due = Counter(self.needs[one] for one in self.due)
        ran = Counter(self.needs[one] for one in self.due & {result.item for result in results})

        def count(items: Counter[Features], profile: Profile) -> int:
            core = profile is Profile.CORE
            return sum(number for needs, number in items.items() if (not needs if core else profile in needs))

        return {profile.value: (count(ran, profile), count(due, profile)) for profile in Profile}

    def newer(self, results: Sequence[Result]) -> Newer:
        """Return a summary of the items that are newer than the targeted contract."""
        major, minor = max((self.since[one.item] for one in results), default=(0, 0))
        failing = sum(one.outcome in (Outcome.UPCOMING, Outcome.DECLARED) for one in results)
        return Newer(len(results), failing, f"{major}.{minor}" if results else "")

    def sort(self, results: Sequence[Result]) -> list[Result]:
        """Return the results in the suite's order. A failed item newer than the target becomes "upcoming"."""
        order = {item: position for position, item in enumerate(self.tiers)}
        upcoming = [
            replace(one, outcome=Outcome.UPCOMING)
            if one.outcome is Outcome.FAILED and one.item not in self.due
            else one
            for one in results
        ]
        return sorted(upcoming, key=lambda result: order[result.item])


def _scope(opened: Opened, tiers: Sequence[str]) -> Scope:
    if Tier.HOST.value not in tiers:
        return Scope.SIZING
    return Scope.BACKEND if Tier.DEVICE.value in tiers or opened.kernels else Scope.METADATA


def _split(results: Sequence[Result], scope: Scope) -> tuple[list[Result], list[Result]]:
    """Return the results that count as passed, and the results that do not. Inconclusive results are in neither list.

    An unjudged item of the host tier is decided by the equivalent item of the device tier, if that item ran. If no
    kernel runs, the verdict covers sizes and metadata, and items with output computed by the suite count as passed.
    """
    ids = {result.item for result in results}
    met, unmet = [], []
    for result in results:
        metadata_alone = scope is Scope.METADATA and result.message == INTERPRETED
        if result.outcome is Outcome.PASSED or metadata_alone:
            met.append(result)
        elif result.outcome is not Outcome.UNJUDGED or f"{result.check}_on_device[{result.case}]" not in ids:
            unmet.append(result)
    return met, unmet
