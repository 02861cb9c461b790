"""Mutants by class of defects, with the design that each is planted in and the group of its author.

``python -m core.contract.tests.mutants.classes`` prints the table. The classes are ways in which checks can be too
narrow: A to K, and W for windows. A mutant by an author who wrote by class has the class as the second letter of its
id. `BY_NUMBER` and `BY_LETTER` have the classes of mutants by the suite's authors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import catalog
from .kills_page import DATA, KillsPage
from .mutant import Mutant

CLASSES = {
    "A": "histories: state that one mode leaves to another",
    "B": "the process: settings, memory, files, many plans",
    "C": "a black box: no suite, fresh memory, any thread",
    "D": "second lives: after a capture, a refusal or a failure",
    "E": "more than two geometries open",
    "F": "sizes as a space",
    "G": "KV pools as engines have them",
    "H": "batch invariance",
    "I": "forks that share pages",
    "J": "sizes in other processes",
    "K": "features at production size",
    "W": "pages left of a window",
}
BY_NUMBER = {"F": ((11, "F"), (100, "K")), "H": ((5, "A"), (8, "D"), (12, "E"), (100, "D"))}
"""Classes of mutants by the suite's authors, by the first letter of the id, as (bound, class).

The first bound above the id's number decides.
"""
BY_LETTER = {"P": "B", "B": "C", "G": "G", "K": "H", "I": "I", "J": "J", "Q": "W"}
"""Class of the other mutants by the suite's authors, by the first letter of the id."""
REFERENCE = "reference"
OUTSIDE = "outside authors"


@dataclass(frozen=True)
class Row:
    """One class of the table.

    Attributes:
        mutants: the mutants of the class.
        elsewhere: mutants that are planted only in correct backends of other designs than the reference.
        outside: mutants by authors who had not read the checks.
        survivors: mutants of the class that survive in some design.
    """

    mutants: Sequence[Mutant]
    elsewhere: Sequence[Mutant]
    outside: Sequence[Mutant]
    survivors: Sequence[str]


def class_of(mutant: Mutant) -> str:
    """Return the letter of a mutant's class; "" for a mutant of no class."""
    letter, number = mutant.id[0], mutant.id[1:3]
    if letter == "O":
        return number[0]
    if letter in BY_NUMBER:
        return next(name for bound, name in BY_NUMBER[letter] if int(number) < bound)
    return BY_LETTER.get(letter, "")


def table() -> dict[str, Row]:
    """Return the row of each class."""
    survivors = {one for one, _ in KillsPage(DATA, "").survivors()}
    found = {}
    for letter in CLASSES:
        mine = [one for one in catalog.MUTANTS if class_of(one) == letter]
        found[letter] = Row(
            mine,
            [one for one in mine if REFERENCE not in one.layouts],
            [one for one in mine if one.origin == OUTSIDE],
            sorted(one.id for one in mine if one.id in survivors),
        )
    return found


def section() -> str:
    """Return the table as a section of the page of kills, with a list of the mutants by outside authors."""
    lines = ["", "## Classes", "", *_table(), ""]
    return "\n".join(lines)


def _table() -> list[str]:
    lines = ["| class | mutants | in other designs only | by outside authors | survive |", "|---|---:|---:|---:|---|"]
    rows = table()
    for letter, row in rows.items():
        counts = " | ".join(str(len(some)) for some in (row.mutants, row.elsewhere, row.outside))
        lines.append(f"| {letter}, {CLASSES[letter]} | {counts} | {', '.join(row.survivors) or 'none'} |")
    lines += ["", "| outside author's mutant | class | design | defect |", "|---|---|---|---|"]
    for letter, row in rows.items():
        lines += [f"| {one.id} | {letter} | {', '.join(one.layouts)} | {one.what} |" for one in row.outside]
    return lines


if __name__ == "__main__":
    print("\n".join(_table()))
