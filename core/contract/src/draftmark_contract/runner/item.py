"""One item of the suite: run a check on a case against a backend, and say how it ended. Nothing escapes."""

from __future__ import annotations

import contextlib
import io
import time
import traceback
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from draftmark.errors import DraftmarkError
from draftmark.version import CONTRACT_MAJOR

from ..backend_under_test import BackendUnderTest
from ..check import Case, Check, ContractViolation, Refused, Tier, all_checks, spread
from .known import KnownFailure
from .limits import LIMIT_S, TimeLimit, time_limit


class Outcome(StrEnum):
    """How an item ended. FAILED alone fails the run."""

    PASSED = "passed"
    REFUSED = "refused"
    """Passed: the geometry is refused, alike everywhere."""
    UNJUDGED = "unjudged"
    """Nothing was found wrong, but what rows see was not looked at: see `BackendUnderTest.unjudged`."""
    KNOWN = "known"
    """Failed as `contract.toml` says it does."""
    UPCOMING = "upcoming"
    """Failed a check that is newer than the contract the plugin targets."""
    FAILED = "failed"


@dataclass(frozen=True)
class Result:
    """How one item ended; `message` is complete enough for a bug report."""

    item: str
    tier: str
    outcome: Outcome
    message: str = ""
    seconds: float = 0.0
    marks: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain types."""
        return {**asdict(self), "outcome": self.outcome.value, "marks": list(self.marks)}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Result:
        """The inverse of `as_json`."""
        return cls(**{**row, "outcome": Outcome(row["outcome"]), "marks": tuple(row["marks"])})


@dataclass(frozen=True)
class Item:
    """A check and one of its cases."""

    check: Check
    case: Case

    @property
    def id(self) -> str:
        """``"check[case]"``."""
        return self.check.item(self.case)

    @property
    def tier(self) -> Tier:
        """The check's tier."""
        return self.check.tier

    @property
    def since(self) -> tuple[int, int]:
        """Contract (major, minor) from which on the item counts."""
        return max(self.check.since, self.case.since)

    @property
    def doc(self) -> str:
        """What the check says about itself."""
        return f"{self.check.name}: {self.check.doc}"


def all_items(tiers: tuple[Tier, ...] = tuple(Tier), sample: int = 0) -> list[Item]:
    """Every item of these tiers, the same for every backend, in one order; or at most `sample` of each check."""
    return [Item(one, case) for one in all_checks() if one.tier in tiers for case in spread(one.cases(), sample)]


def run_item(item: Item, subject: BackendUnderTest, known: list[KnownFailure]) -> Result:
    """Run one item. Whatever the plugin raises, prints or hangs in becomes a `Result`."""
    subject = replace(subject, tier=item.tier, marks=set(), attended=False)
    start = time.monotonic()
    outcome, message = _run(item, subject)
    seconds = round(time.monotonic() - start, 3)
    entry = next((one for one in known if one.matches(item.id)), None)
    if outcome is Outcome.FAILED and entry is not None:
        outcome, message = Outcome.KNOWN, f"{entry.id}: {entry.reason} ({entry.fault}, {entry.url})\n{message}"
    elif outcome is Outcome.FAILED and item.since > (CONTRACT_MAJOR, subject.backend.info.contract_minor):
        outcome = Outcome.UPCOMING
    elif entry is not None and outcome is Outcome.PASSED:
        outcome, message = Outcome.FAILED, f"known failure {entry.id!r} passes now: remove it from contract.toml"
    return Result(item.id, item.tier.value, outcome, message, seconds, tuple(sorted(subject.marks)))


def _run(item: Item, subject: BackendUnderTest) -> tuple[Outcome, str]:
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), time_limit(LIMIT_S):
            item.check.run(subject, item.case)
    except Refused as refusal:
        return Outcome.REFUSED, str(refusal)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a plugin may raise anything, SystemExit included
        return Outcome.FAILED, f"{item.doc}\n{_explain(error)}"
    if said.getvalue():
        return Outcome.FAILED, f"{item.doc}\nthe backend printed {said.getvalue()[:200]!r}; use logging"
    if subject.unjudged:
        return Outcome.UNJUDGED, "the layout is opaque or not declared, and no kernel that reads it ran here"
    return Outcome.PASSED, ""


def _explain(error: BaseException) -> str:
    if isinstance(error, ContractViolation):
        return str(error)
    if isinstance(error, TimeLimit):
        where = traceback.extract_tb(error.__traceback__)[-2]  # the last one is the alarm's own
        return f"{error}, stuck in {where.name} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    if isinstance(error, DraftmarkError):
        return f"{type(error).__name__}: {error}{_where(error)}"
    return f"raised {type(error).__name__}: {error}{_where(error)}"


def _where(error: BaseException) -> str:
    """The last frames, by file name alone, of the error and of what caused it."""
    lines = []
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)[-3:]
        lines += [f"  {type(cause).__name__} at {f.filename.rpartition('/')[2]}:{f.lineno} in {f.name}" for f in frames]
        cause = cause.__cause__
    return "".join(f"\n{line}" for line in lines)
