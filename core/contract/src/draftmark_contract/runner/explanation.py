"""What a failed item says: the rule, what broke it, the batch, the known bugs, and a command that runs it again."""

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
    """Several lines, complete enough for a bug report.

    The batch is shown whatever was raised: a violation's own, else the forward or geometry that the item was at; and so
    are notes, such as how the batch of a failed replay ends eagerly (`harness.eagerly`).
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
    """The rule's number in the specification; a check of somebody's own has none."""
    rule = rules().get(name_of(check))
    return f" (rule {rule.number})" if rule else ""


def again(backend: str, item: str, device: str = "") -> str:
    """The line with the command that runs this very item."""
    where = f" --device {device}" if device else ""
    return f"  run it again: draftmark contract {backend}{where} --item {shlex.quote(item)}"


def _raised(error: BaseException) -> str:
    if isinstance(error, TimeLimit):
        where = traceback.extract_tb(error.__traceback__)[-2]  # the last one is the alarm's own
        return f"{error}, stuck in {where.name} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    if isinstance(error, (Refused, BackendRefusal)):
        return f"the backend refuses in the middle of the work; a refusal counts from supports() alone: {error}"
    kind = type(error).__name__
    return f"{kind if isinstance(error, DraftmarkError) else f'raised {kind}'}: {error}{_where(error)}"


def _where(error: BaseException) -> str:
    """The last frames, by file name alone, of the error and of what caused it."""
    lines = []
    cause: BaseException | None = error
    while cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)[-3:]
        lines += [f"  {type(cause).__name__} at {f.filename.rpartition('/')[2]}:{f.lineno} in {f.name}" for f in frames]
        cause = cause.__cause__
    return "".join(f"\n{line}" for line in lines)
