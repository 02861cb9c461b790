"""Builds the message of a failed item: rule, cause, batch, known bugs, and a command that runs this item again."""

from __future__ import annotations

import shlex
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from draftmark.errors import BackendRefusal, DraftmarkError
from draftmark.geometry import Geometry

from ..check import ContractViolation, Refused
from ..judge.rules import ON_DEVICE, name_of, rules
from ..sizing.batches import brief
from .limits import TimeLimit

if TYPE_CHECKING:
    from ..check import Case, Check

HIDDEN = (str(Path(__file__).with_name("item.py")),)
"""Files with stack frames of the runner, which explain no failure."""


def explanation(error: BaseException, check: Check, case: Case, asks: str, current: object, command: str) -> str:
    """Return a message of several lines, complete enough for a bug report.

    The message always shows a batch: the violation's batch, or else the forward or geometry that the item was using. It
    also contains the exception's notes, e.g. the eager result of a batch with a failed replay (`harness.eagerly`).
    """
    violation = error if isinstance(error, ContractViolation) else None
    lines = [str(violation) if violation else _raised(error)]
    if (violation is None or violation.details["batch"] is None) and current is not None:
        lines.append(f"  batch: {brief(current) if isinstance(current, Geometry) else current}")
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    rule = rules().get(name_of(check))
    bugs = check.bugs or (rule.bugs if rule else ())
    if bugs and not (violation and violation.details["known from"]):
        lines.append(f"  bugs of this class: {', '.join(bugs)}")
    head = heading(check.name, check.doc, asks)
    return "\n".join([*head, *lines, again(command, check.item(case))])


def heading(check: str, doc: str = "", asks: str = "") -> list[str]:
    """Return the lines about a check's rule: its number, its sentence, and how an item tests it.

    Args:
        doc: the sentence; "" for the sentence of the contract's rule.
    """
    rule = rules().get(check.removesuffix(ON_DEVICE))
    number, text = (f" (rule {rule.number})", doc or rule.text) if rule else ("", doc or "no rule of the contract")
    return [f"{check}{number}: {text}", *([f"checked here as: {asks}"] if asks else [])]


def again(command: str, item: str) -> str:
    """Return the message line that contains the command which runs only this item."""
    return f"  run it again: {command} --item {shlex.quote(item)}"


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
        frames = [one for one in traceback.extract_tb(cause.__traceback__) if one.filename not in HIDDEN][-3:]
        lines += [f"  {type(cause).__name__} at {f.filename.rpartition('/')[2]}:{f.lineno} in {f.name}" for f in frames]
        cause = cause.__cause__
    return "".join(f"\n{line}" for line in lines)
