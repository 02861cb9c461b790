"""Runs one item of the suite (a check on one case) against a backend, and catches every error."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from draftmark.loaded import LoadedBackend
from draftmark.version import CONTRACT_MAJOR

from ..check import Case, Check, ContractViolation, Need, Refused, Tier, Unjudged, all_checks, spread
from ..failing_batch import Drawing, drawing
from ..judge.rules import name_of
from ..profiles import OF_STATE, Features
from .explanation import explanation
from .known import KnownFailure
from .limits import LIMIT_S, time_limit
from .outcome import Outcome, Result
from .resources import exhausted


@dataclass(frozen=True)
class Item:
    """A check and one of its cases.

    Attributes:
        asks: one sentence that states how this item tests the check's rule; "" if the rule's own text is enough.
    """

    check: Check
    case: Case
    asks: str = ""

    @property
    def id(self) -> str:
        """Item id, ``"check[case]"``. It is the argument of `--item`."""
        return self.check.item(self.case)

    @property
    def rule(self) -> str:
        """Name of the contract's rule: the check's name without its tier suffix."""
        return name_of(self.check)

    def run(self, subject: Any = None) -> None:
        """Run the check on this subject; an item of `item_of` has its own subject.

        Raises:
            ContractViolation: the subject breaks the rule.
            Refused: the subject refuses the input.
            Unjudged: the item cannot run here.
        """
        self.check.run(subject, self.case)

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
        return self.case.needs


def item_of(rule: str, case: str, run: Callable[[], None], asks: str = "") -> Item:
    """Return an item with its own function, for a rule that an engine's layer is tested by in its own way."""
    return Item(Check(rule, Tier.HOST, tuple, lambda subject, value: run(), (1, 0), (), ""), Case(case, None), asks)


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


class UnderTest(Protocol):
    """Subject of one item, with the state of the item that runs.

    Attributes:
        current: forward or geometry that the item runs now; every error message includes it.
        marks: labels of this item for the verdict.
    """

    current: object
    marks: set[str]

    @property
    def command(self) -> str:
        """Command that judges this subject."""

    @property
    def lacks(self) -> Mapping[Need, str]:
        """Abilities that the subject does not have, each with the reason."""

    @property
    def minor(self) -> int:
        """Minor version of the contract that the subject targets."""

    @property
    def unjudged(self) -> str:
        """Reason why an item that found no violation still does not count as passed; "" if the item counts."""

    def for_item(self, tier: Tier) -> UnderTest:
        """Return the subject for the next item, with fresh state."""

    @property
    def serves_core(self) -> bool:
        """True if the subject must serve the core profile, so that a refused core item fails."""

    def admits(self, error: Refused | Unjudged) -> bool:
        """Return True if an item may end with this error; otherwise the error counts as a failure."""

    def printed(self, text: str) -> None:
        """Receive the text that an item without an error has printed.

        Raises:
            ContractViolation: the subject must not print.
        """


def run_item(item: Item, subject: UnderTest, known: Sequence[KnownFailure] = (), limit: float = LIMIT_S) -> Result:
    """Run one item and return its `Result`. Exceptions, printed output and hangs of the backend become part of it.

    Args:
        known: declared failures of the plugin.
        limit: seconds after which the item fails.

    Raises:
        RunStopped: the machine ran out of memory or disk, so the item gives no result for the backend.
    """
    subject = subject.for_item(item.tier)
    start = time.monotonic()
    outcome, message, drawn = _run(item, subject, limit)
    seconds = round(time.monotonic() - start, 3)
    entry = next((one for one in known if one.matches(item.id)), None)
    if outcome is Outcome.FAILED and entry is not None:
        outcome, message = Outcome.DECLARED, f"{entry.id}: {entry.reason} ({entry.fault}, {entry.url})\n{message}"
    elif outcome is Outcome.PASSED and entry is not None:
        outcome, message = Outcome.FAILED, f"known failure {entry.id!r} passes now: remove it from contract.toml"
    if outcome is Outcome.FAILED and item.since > (CONTRACT_MAJOR, subject.minor):
        outcome = Outcome.UPCOMING
    return Result(item.id, item.tier.value, outcome, message, seconds, tuple(sorted(subject.marks)), drawn)


CORE_REMEDY = "accept it in supports(), because every backend serves the core profile"
PARTLY_REFUSED = "partly refused"
"""Mark of an item that was judged on only some of its geometries because the others were refused."""


def _run(item: Item, subject: UnderTest, limit: float) -> tuple[Outcome, str, Drawing | None]:
    """Return the outcome, its message, and the batch of a failure as plain data."""
    said = io.StringIO()
    lacked = [subject.lacks[need] for need in Need if need in item.check.needs and need in subject.lacks]
    if lacked:
        return Outcome.UNJUDGED, lacked[0], None
    try:
        with contextlib.redirect_stdout(said), time_limit(limit):
            item.run(subject)
        subject.printed(said.getvalue())
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # A plugin may raise any exception, including SystemExit.
        if isinstance(error, Refused) and subject.admits(error) and subject.serves_core and not item.needs:
            error = ContractViolation("a geometry of the core profile is refused", got=str(error), remedy=CORE_REMEDY)
        elif isinstance(error, (Refused, Unjudged)) and subject.admits(error):
            return Outcome.REFUSED if isinstance(error, Refused) else Outcome.UNJUDGED, str(error), None
        if stopped := exhausted(error, item.id):
            raise stopped from error
        return (
            Outcome.FAILED,
            explanation(error, item.check, item.case, item.asks, subject.current, subject.command),
            drawing(error, subject.current),
        )
    return (Outcome.UNJUDGED, subject.unjudged, None) if subject.unjudged else (Outcome.PASSED, "", None)
