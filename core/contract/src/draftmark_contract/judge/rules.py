"""The contract's rules by name, with the number that each keeps for ever and the public bugs of its class."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from ..check import Check, all_checks

FILE = "rules.toml"
ON_DEVICE = "_on_device"


@dataclass(frozen=True)
class Rule:
    """One numbered rule.

    Attributes:
        number: its place in `FILE`; never given to another rule.
        name: of the check that decides it for a plugin, without its tier.
        text: what it asks, a sentence.
        bugs: public threads that it is known from.
    """

    number: int
    name: str
    text: str
    bugs: tuple[str, ...]


def name_of(check: Check) -> str:
    """A check's name without its tier; the one check that is on the device alone keeps its own."""
    return check.name.removesuffix(ON_DEVICE)


def numbers() -> tuple[list[str], list[str]]:
    """Names of all rules in the order of their numbers, the first being 1; and of those whose check is gone."""
    read = tomllib.loads(files(__package__.partition(".")[0]).joinpath(FILE).read_text(encoding="utf-8"))
    return read["rules"], read["gone"]


@cache
def rules() -> dict[str, Rule]:
    """Every rule that has a check, by name, in the order of the numbers."""
    checks: dict[str, Check] = {}
    for check in all_checks():
        checks.setdefault(name_of(check), check)
    return {
        name: Rule(number, name, checks[name].doc, checks[name].bugs)
        for number, name in enumerate(numbers()[0], 1)
        if name in checks
    }
