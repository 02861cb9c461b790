"""The rows of docs/contract-kills.md, and the checks as rules: a rule is one check, on the host and on the device."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from draftmark_contract.check import Check, all_checks
from draftmark_contract.judge.rules import ON_DEVICE, name_of, numbers

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
THREAD = re.compile(r"[\w./()-]+#\d+")
NOTHING = ("not run yet", "**nothing**")
NUMBERS = ROOT / "core" / "contract" / "src" / "draftmark_contract" / "rules.toml"


@dataclass(frozen=True)
class Mutant:
    """A defect made in a correct backend.

    Attributes:
        id: ``"M01"``.
        what: the defect.
        threads: public threads that it comes from.
        killers: names of the rules that fail on it; empty where none was run.
    """

    id: str
    what: str
    threads: frozenset[str]
    killers: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """One numbered rule of the contract.

    Attributes:
        number: its place in rules.toml; never given to another rule.
        check: the check that decides it, the host's where there are two.
        tiers: ``"host and device"``.
    """

    number: int
    check: Check
    tiers: str

    @property
    def link(self) -> str:
        """Markdown: the rule on the page of the specification."""
        return f"[{self.number} `{self.check.name}`]({page_of_specification()}#rule-{self.number})"


def page_of_specification(minor: int | None = None) -> str:
    """The specification's file: one for each minor of the contract; by default of the newest."""
    from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR

    return f"specification-{CONTRACT_MAJOR}.{CONTRACT_MINOR if minor is None else minor}.md"


def mutants(page: Path = DOCS / "contract-kills.md") -> dict[str, Mutant]:
    """Every mutant of the page, by id; what kills it in any layout."""
    found: dict[str, Mutant] = {}
    for line in page.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) != 5 or not re.fullmatch(r"[A-Z]\d\d\w?", cells[0]):
            continue
        name, what, source, _, killers = cells
        known = found[name].killers if name in found else ()
        new = () if killers in NOTHING else tuple(one.removesuffix(ON_DEVICE) for one in killers.split(", "))
        found[name] = Mutant(name, what, frozenset(THREAD.findall(source)), tuple(dict.fromkeys(known + new)))
    return found


def rules() -> dict[str, Rule]:
    """Every rule by the name of its check, in the order of their numbers.

    Raises:
        ValueError: rules.toml lacks a check or names one that is not there.
    """
    by_name: dict[str, list[Check]] = {}
    for check in all_checks():
        by_name.setdefault(name_of(check), []).append(check)
    numbered, gone = numbers()
    wrong = sorted(set(by_name) - set(numbered)) + sorted(set(numbered) - set(by_name) - set(gone))
    if wrong or len(set(numbered)) < len(numbered):
        raise ValueError(
            f"rules.toml and the checks differ in {', '.join(wrong) or 'a name given twice'}; "
            "`make pages` appends a new check; add one that is gone to `gone`"
        )
    return {
        name: Rule(number, by_name[name][0], " and ".join(str(one.tier) for one in by_name[name]))
        for number, name in enumerate(numbered, 1)
        if name in by_name
    }


def number_new_checks() -> None:
    """Append each check that has no number to rules.toml, in the order of learning; no number changes."""
    text = NUMBERS.read_text(encoding="utf-8")
    known = tomllib.loads(text)["rules"]
    new = [name for name in dict.fromkeys(map(name_of, all_checks())) if name not in known]
    added = "".join(f'\n    "{name}",' for name in new)
    NUMBERS.write_text(text.replace("\n]\n", f"{added}\n]\n", 1), encoding="utf-8")
