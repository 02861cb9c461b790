"""Builds the message of a failed item: rule, cause, batch, known bugs, and a command that runs this item again."""

from __future__ import annotations

import shlex
import traceback

from draftmark.errors import BackendRefusal, DraftmarkError
from draftmark.geometry import Geometry

from ..backend_under_test import BackendUnderTest
from ..check import Case, Check, ContractViolation, Refused, Tier
from ..judge.rules import name_of, rules
from ..sizing.batches import brief
from .limits import TimeLimit


def explanation(error: BaseException, check: Check, case: Case, subject: BackendUnderTest) -> str:
    """Return a message of several lines, complete enough for a bug report.

    The message always shows a batch: the violation's batch, or else the forward or geometry that the item was using. It
    also contains the exception's notes, e.g. the eager result of a batch with a failed replay (`harness.eagerly`).
    """
    violation = error if isinstance(error, ContractViolation) else None
    lines = [f"{check.name}{_number(check)}: {check.doc}", str(violation) if violation else _raised(error)]
    if (violation is None or violation.details["batch"] is None) and subject.current is not None:
        at = subject.current
        lines.append(f"  batch: {brief(at) if isinstance(at, Geometry) else at}")
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    if check.bugs and not (violation and violation.details["known from"]):
        lines.append(f"  bugs of this class: {', '.join(check.bugs)}")
    device = subject.device if subject.tier is Tier.DEVICE else ""
    return "\n".join([*lines, again(subject.backend.name, check.item(case), device)])


def _number(check: Check) -> str:
    """Return the rule's number as text; "" for a check that is not part of the contract."""
    rule = rules().get(name_of(check))
    return f" (rule {rule.number})" if rule else ""


def again(backend: str, item: str, device: str = "") -> str:
    """Return the message line that contains the command which runs only this item."""
    where = f" --device {device}" if device else ""
    return f"  run it again: draftmark contract {backend}{where} --item {shlex.quote(item)}"


def _raised(error: BaseException) -> str:
    if isinstance(error, TimeLimit):
        # The last frame is the alarm handler itself, so take the frame before it.
        where = traceback.extract_tb(error.__traceback__)[-2]
        return f"{error}, stuck in {where.name} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    if isinstance(error, (Refused, BackendRefusal)):
        return f"the backend refused during the run; only supports() may refuse a geometry: {error}"
    kind = type(error).__name__
    return f"{kind if isinstance(error, DraftmarkError) else f'raised {kind}'}: {error}{_where(error)}"


def _where(error: BaseException) -> str:
    """Return the last stack frames of the error and of its causes, with file names without folders."""
    lines = []
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)[-3:]
        lines += [f"  {type(cause).__name__} at {f.filename.rpartition('/')[2]}:{f.lineno} in {f.name}" for f in frames]
        cause = cause.__cause__
    return "".join(f"\n{line}" for line in lines)
