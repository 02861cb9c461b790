"""Builds the message of a failed item: rule number, known bugs, cause, and a command that runs only this item."""

from __future__ import annotations

import shlex
import traceback

from draftmark.errors import DraftmarkError

from ..check import ContractViolation
from ..runner.limits import TimeLimit
from .item import Item
from .rules import rules

FRAMES = 4
"""Number of innermost traceback frames that a message contains."""


def finding(error: BaseException | str, item: Item, command: str) -> str:
    """Return a message of several lines, complete enough for a bug report.

    Args:
        error: exception of the item, or a sentence that states how the item ended.
        item: item that failed.
        command: command that runs all items of the target, e.g. ``"draftmark judge vllm:CPU_ATTN"``.
    """
    return "\n".join([*_head(item), *_said(error).splitlines(), *_known(item, error), again(command, item.id)])


def again(command: str, item: str) -> str:
    """Return the message line that contains the command which runs only this item."""
    return f"  run it again: {command} --item {shlex.quote(item)}"


def _head(item: Item) -> list[str]:
    rule = rules().get(item.rule)
    lines = [f"rule {rule.number}, {rule.name}: {rule.text}"] if rule else [f"{item.rule}: no rule of the contract"]
    return [*lines, f"checked here as: {item.asks}"] if item.asks else lines


def _known(item: Item, error: BaseException | str) -> list[str]:
    """Return the message line with the rule's known bugs, or no line if the violation already lists bugs."""
    if isinstance(error, ContractViolation) and error.details["known from"]:
        return []
    rule = rules().get(item.rule)
    return [f"  known from: {', '.join(rule.bugs)}"] if rule and rule.bugs else []


def _said(error: BaseException | str) -> str:
    if isinstance(error, (str, ContractViolation, TimeLimit)):
        return str(error)
    if isinstance(error, DraftmarkError):
        return f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    places = [f"  at {one.filename.rpartition('/')[2]}:{one.lineno} in {one.name}" for one in frames]
    text = " ".join(str(error).split())
    return "\n".join([f"raised {type(error).__name__}: {text[:400]}", *places])
