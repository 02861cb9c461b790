"""Mutants with the checks that kill them, and checks as numbered rules. A rule is one check in one or two tiers."""

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
NUMBERS = ROOT / "core" / "contract" / "src" / "draftmark_contract" / "rules.toml"


@dataclass(frozen=True)
class Mutant:
    """A defect made in a correct backend.

    Attributes:
        id: ``"M01"``.
        what: the defect.
        threads: public threads with this bug.
        killers: names of the rules that fail on it; empty if it was not run.
    """

    id: str
    what: str
    threads: frozenset[str]
    killers: tuple[str, ...]


@dataclass(frozen=True)
class Rule:
    """One numbered rule of the contract.

    Attributes:
        number: place in rules.toml; never reused for another rule.
        check: the check, of the host tier if two tiers have it.
        tiers: ``"host and device"``.
    """

    number: int
    check: Check
    tiers: str

    @property
    def link(self) -> str:
        """Markdown link to the rule on the specification's page."""
        return f"[{self.number} `{self.check.name}`]({page_of_specification()}#rule-{self.number})"


def page_of_specification() -> str:
    """File name of the specification, for the newest minor of the contract."""
    from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR

    return f"specification-{CONTRACT_MAJOR}.{CONTRACT_MINOR}.md"


def mutants() -> dict[str, Mutant]:
    """Return every mutant by id, with the checks that kill it in any layout."""
    from core.contract.tests.mutants import catalog
    from core.contract.tests.mutants.kills_page import DATA, KillsPage

    rows = KillsPage(DATA, "").rows
    found = {}
    for one in catalog.MUTANTS:
        kills = [row.checks or () for (name, _), row in rows.items() if name == one.id]
        names = dict.fromkeys(check.removesuffix(ON_DEVICE) for checks in kills for check in checks)
        found[one.id] = Mutant(one.id, one.what, frozenset(THREAD.findall(one.source)), tuple(names))
    return found


def kills_page() -> str:
    """Return the page of mutants and the checks that kill them, Markdown."""
    from core.contract.tests.mutants.__main__ import today
    from core.contract.tests.mutants.kills_page import DATA, KillsPage

    return KillsPage(DATA, today()).page()


def mutation_page() -> str:
    """Return the page of mutants made by rule, Markdown."""
    from core.contract.tests.source_mutants import page

    return page.page()


def rules() -> dict[str, Rule]:
    """Return the rules by the name of their check, in the order of their numbers.

    Raises:
        ValueError: rules.toml lacks a check or names an unknown one.
    """
    by_name: dict[str, list[Check]] = {}
    for check in all_checks():
        by_name.setdefault(name_of(check), []).append(check)
    numbered, gone = numbers()
    wrong = sorted(set(by_name) - set(numbered)) + sorted(set(numbered) - set(by_name) - set(gone))
    if wrong or len(set(numbered)) < len(numbered):
        raise ValueError(
            f"rules.toml and the checks differ in {', '.join(wrong) or 'a name given twice'}; "
            "`python -m tools.docs.specification` appends new checks; add removed ones to `gone`"
        )
    return {
        name: Rule(number, by_name[name][0], " and ".join(str(one.tier) for one in by_name[name]))
        for number, name in enumerate(numbered, 1)
        if name in by_name
    }


def number_new_checks() -> None:
    """Append checks without a number to rules.toml, in the order in which they run; no number changes."""
    text = NUMBERS.read_text(encoding="utf-8")
    known = tomllib.loads(text)["rules"]
    new = [name for name in dict.fromkeys(map(name_of, all_checks())) if name not in known]
    added = "".join(f'\n    "{name}",' for name in new)
    NUMBERS.write_text(text.replace("\n]\n", f"{added}\n]\n", 1), encoding="utf-8")
