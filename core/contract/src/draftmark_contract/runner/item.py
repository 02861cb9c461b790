"""Runs one item of the suite (a check on one case) against a backend, and catches every error."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Collection
from dataclasses import dataclass

from draftmark.loaded import LoadedBackend
from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR

from ..backend_under_test import BackendUnderTest
from ..check import Case, Check, ContractViolation, Refused, Tier, all_checks, spread
from ..failing_batch import Drawing, drawing
from ..profiles import OF_STATE, Features, needs
from .explanation import explanation
from .known import KnownFailure
from .limits import LIMIT_S, time_limit
from .outcome import Outcome, Result
from .resources import exhausted
from .stopped import RunStopped


@dataclass(frozen=True)
class Item:
    """A check and one of its cases."""

    check: Check
    case: Case

    @property
    def id(self) -> str:
        """Item id, ``"check[case]"``."""
        return self.check.item(self.case)

    @property
    def tier(self) -> Tier:
        """Tier of the check."""
        return self.check.tier

    @property
    def since(self) -> tuple[int, int]:
        """First contract, as (major, minor), that contains the item."""
        return max(self.check.since, self.case.since)

    @property
    def needs(self) -> Features:
        """Profiles (feature sets) that the item needs. A backend that does not serve them may refuse it."""
        return needs(self.case.value if self.case.geometry is None else self.case.geometry)


def all_items(
    tiers: tuple[Tier, ...] = tuple(Tier),
    sample: int = 0,
    names: Collection[str] | None = None,
    backend: LoadedBackend | None = None,
) -> list[Item]:
    """Return all items of these tiers in a fixed order that no backend changes; at most `sample` per check.

    Args:
        names: names of checks; None for all. The cases of other checks are not built.
        backend: leave out the items of layers that this plugin has no hooks for; None for every item.
    """
    checks = [one for one in all_checks() if one.tier in tiers and (names is None or one.name in names)]
    found = [Item(one, case) for one in checks for case in spread(one.cases(), sample)]
    serves_state = backend is None or bool(backend.info.recurrences)
    return found if serves_state else [one for one in found if not one.needs & OF_STATE]


def targeted_minor(backend: LoadedBackend) -> int:
    """Return the contract minor that the plugin targets, or the newest minor if the plugin's value is invalid."""
    minor = backend.info.contract_minor
    return minor if type(minor) is int and 0 <= minor <= CONTRACT_MINOR else CONTRACT_MINOR


def run_item(item: Item, subject: BackendUnderTest, known: list[KnownFailure]) -> Result:
    """Run one item and return its `Result`. Exceptions, printed output and hangs of the plugin become part of it.

    Raises:
        RunStopped: the machine ran out of memory or disk, so the item gives no result for the plugin.
    """
    subject = subject.for_item(item.tier)
    start = time.monotonic()
    outcome, message, drawn = _run(item, subject)
    seconds = round(time.monotonic() - start, 3)
    entry = next((one for one in known if one.matches(item.id)), None)
    if outcome is Outcome.FAILED and entry is not None:
        outcome, message = Outcome.DECLARED, f"{entry.id}: {entry.reason} ({entry.fault}, {entry.url})\n{message}"
    elif outcome is Outcome.PASSED and entry is not None:
        outcome, message = Outcome.FAILED, f"known failure {entry.id!r} passes now: remove it from contract.toml"
    if outcome is Outcome.FAILED and item.since > (CONTRACT_MAJOR, targeted_minor(subject.backend)):
        outcome = Outcome.UPCOMING
    if outcome is Outcome.PASSED and subject.refused:
        subject.marks.add(PARTLY_REFUSED)
    return Result(item.id, item.tier.value, outcome, message, seconds, tuple(sorted(subject.marks)), drawn)


PARTLY_REFUSED = "partly refused"
"""Mark of an item that was judged on only some of its geometries because the others were refused."""


def _run(item: Item, subject: BackendUnderTest) -> tuple[Outcome, str, Drawing | None]:
    """Return the outcome, its message, and the batch of a failure as plain data."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), time_limit(LIMIT_S):
            item.check.run(subject, item.case)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A plugin may raise any exception, including SystemExit.
        if isinstance(error, Refused) and any(error is one for one in subject.refused):
            return Outcome.REFUSED, str(error), None
        if reason := exhausted(error):
            raise RunStopped(f"in {item.id} {reason}") from error
        message = explanation(error, item.check, item.case, subject)
        return Outcome.FAILED, message, drawing(error, subject.current)
    if said.getvalue():
        printed = ContractViolation("the backend printed", got=repr(said.getvalue()[:200]), remedy="use logging")
        return Outcome.FAILED, explanation(printed, item.check, item.case, subject), None
    if subject.unjudged:
        return Outcome.UNJUDGED, subject.unjudged, None
    return Outcome.PASSED, "", None
