"""The contract's rules by name. Each has a permanent number and the public bugs that it would have found."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..check import Check, all_checks

FILE = "rules.toml"
ON_DEVICE = "_on_device"


@dataclass(frozen=True)
class Rule:
    """Holds one numbered rule of the contract.

    Attributes:
        number: position in `FILE`; a number is never reused for another rule.
        name: name of the contract check for plugins, without its tier suffix.
        text: one sentence that states the rule.
        bugs: public bug reports about code that breaks this rule.
    """

    number: int
    name: str
    text: str
    bugs: tuple[str, ...]


def name_of(check: Check) -> str:
    """Return a check's name without its tier suffix."""
    return check.name.removesuffix(ON_DEVICE)


def left_out(covered: Collection[str], reasons: Mapping[str, str]) -> dict[str, str]:
    """Return every rule without an item → the reason for the rule or for its module; "" if there is none.

    Args:
        covered: rules that have an item.
        reasons: reasons by rule, or by module of rules.
    """
    left = [name for name in rules() if name not in covered]
    return {name: reasons.get(name) or reasons.get(name.partition(".")[0], "") for name in left}


def numbers() -> tuple[list[str], list[str]]:
    """Return all rule names in the order of their numbers (from 1), and the names of rules that have no check today."""
    read = tomllib.loads(files(__package__.partition(".")[0]).joinpath(FILE).read_text(encoding="utf-8"))
    return read["rules"], read["gone"]


@cache
def rules() -> dict[str, Rule]:
    """Return every rule that has a check, by name, ordered by number."""
    checks: dict[str, Check] = {}
    for check in all_checks():
        checks.setdefault(name_of(check), check)
    return {
        name: Rule(number, name, checks[name].doc, checks[name].bugs)
        for number, name in enumerate(numbers()[0], 1)
        if name in checks
    }
