"""Computes the verdict from the results of a run: counts, served profiles, and scope."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR

from ..backend_under_test import INTERPRETED, BackendUnderTest
from ..check import Tier
from ..profiles import Features, Profile, served_in_full, shown_in_core_shape
from .identity import identity_of, parts_of
from .item import all_items
from .known import known_failures
from .outcome import Counts, Outcome, Result
from .source import source_of
from .verdict import Newer, Scope, Verdict

if TYPE_CHECKING:
    from draftmark.loaded import LoadedBackend


def judge(
    name: str,
    backend: LoadedBackend | None,
    results: Sequence[Result],
    error: str = "",
    runs: Sequence[dict[str, Any]] = (),
) -> Verdict:
    """Return the verdict on a run's results. `backend` is None if it does not load, and `error` has the reason."""
    suite = _Suite.targeted_by(backend)
    results = suite.sort(results)
    due = [result for result in results if result.item in suite.due]
    newer = [result for result in results if result.item not in suite.due]
    total, ran = (Counter(suite.tiers[item] for item in ids) for ids in (suite.due, [one.item for one in due]))
    tiers = tuple(tier.value for tier in Tier if total[tier.value] and ran[tier.value] == total[tier.value])
    scope = _scope(backend, tiers)
    met, unmet = _split(results, scope)
    core = [one for one in unmet if one.item in suite.due and not suite.needs[one.item]]
    # A newer item cannot remove the core profile: the verdict line names the older contract and the newer failures.
    gaps = [suite.needs[one.item] for one in unmet if one.item in suite.due or suite.needs[one.item]]
    # Sizes do not prove that a kernel works. If the host tier ran, only items of later tiers prove a profile.
    showing = [one for one in met if scope is Scope.SIZING or one.tier != Tier.SIZING]
    profiles = served_in_full([suite.needs[one.item] for one in showing], gaps, suite.in_core_shape)
    verdict = Verdict(
        backend=name,
        results=tuple(results),
        items={tier.value: total[tier.value] for tier in Tier},
        tiers_run=tiers,
        counts=Counts.of(due, len(suite.due)),
        core=dict(Counter(one.outcome.value for one in core)),
        profiles=tuple(profiles),
        scope=scope,
        minor=suite.minor,
        newer=suite.newer(newer),
        error=error,
        runs=tuple(runs),
        tried=suite.tried(due),
        **(_about(backend) if backend else {}),
    )
    return verdict if verdict.complete else replace(verdict, profiles=())


@dataclass(frozen=True)
class _Suite:
    """Holds the items of the suite, for a backend that targets contract ``1.minor``.

    Attributes:
        tiers, needs, since: values of every item, by id, in the suite's order.
        due: ids of the items in the targeted contract; all other items are newer.
    """

    minor: int
    tiers: dict[str, str]
    needs: dict[str, Features]
    since: dict[str, tuple[int, int]]
    due: frozenset[str]

    @classmethod
    def targeted_by(cls, backend: LoadedBackend | None) -> _Suite:
        """Return the items for a backend's targeted contract, or for the newest contract if `backend` is None."""
        items, minor = (
            all_items(backend=backend),
            BackendUnderTest(backend, "cpu", Tier.HOST).minor if backend else CONTRACT_MINOR,
        )
        since = {item.id: item.since for item in items}
        due = frozenset(item for item in since if since[item] <= (CONTRACT_MAJOR, minor))
        tiers, needs = {item.id: item.tier.value for item in items}, {item.id: item.needs for item in items}
        return cls(minor, tiers, needs, since, due)

    @property
    def in_core_shape(self) -> Features:
        """Profiles that have an item in the core's own shape in a tier after the sizing tier."""
        return shown_in_core_shape(needs for item, needs in self.needs.items() if self.tiers[item] != Tier.SIZING)

    def tried(self, results: Sequence[Result]) -> dict[str, tuple[int, int]]:
        """Return, for each profile, the number of items that ran and the number of all targeted items."""
        ran = {result.item for result in results}
        found = {}
        for profile in Profile:
            core = profile is Profile.CORE
            items = {one for one in self.due if (not self.needs[one] if core else profile in self.needs[one])}
            found[profile.value] = (len(items & ran), len(items))
        return found

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


def _about(backend: LoadedBackend) -> dict[str, Any]:
    try:
        known = known_failures(backend)
    except ValueError:  # The check load.known_failures_are_current reports this error.
        known = []
    return {
        "identity": identity_of(backend),
        "source": source_of(parts_of(backend)),
        "info": asdict(backend.info),
        "known": tuple(asdict(entry) for entry in known),
    }


def _scope(backend: LoadedBackend | None, tiers: Sequence[str]) -> Scope:
    if Tier.HOST.value not in tiers:
        return Scope.SIZING
    kernels = Tier.DEVICE.value in tiers or backend is None or backend.info.host_kernels
    return Scope.BACKEND if kernels else Scope.METADATA


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
