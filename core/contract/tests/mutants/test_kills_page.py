"""docs/contract-kills.md keeps what was seen, says on which suite, and counts it."""

from __future__ import annotations

from pathlib import Path

from . import catalog
from .__main__ import PAGE
from .kills_page import NOT_RUN, KillsPage
from .strangers import MUTANTS as STRANGERS

FIRST, SECOND = [(one.id, layout) for one in STRANGERS for layout in one.layouts][:2]


def test_rows_that_no_suite_has_judged_are_due_first(tmp_path: Path) -> None:
    """Then come those of earlier suites; those of today's are not due."""
    page = tmp_path / "kills.md"
    KillsPage(page, "before").note(FIRST, ["numerics.match_float64"])
    today = KillsPage(page, "today")
    assert len(today.due()) == len(catalog.pairs()) and today.due()[-1] == FIRST
    today.note(SECOND, ["guards.find_no_poison_read"])
    assert SECOND not in KillsPage(page, "today").due()


def test_a_row_keeps_its_suite_when_others_are_run(tmp_path: Path) -> None:
    """What a page says of a row is read again: its checks, and the suite that judged it."""
    page = tmp_path / "kills.md"
    KillsPage(page, "before").note(FIRST, ["numerics.match_float64", "late.rounds_outlive_their_backend"])
    KillsPage(page, "between").note(SECOND, [])
    again = KillsPage(page, "today")
    again.write()
    rows = KillsPage(page, "today").rows
    assert rows == again.rows
    assert rows[FIRST].checks == ("numerics.match_float64", "late.rounds_outlive_their_backend")
    assert (rows[FIRST].suite, rows[SECOND].suite) == ("before", "between")


def test_a_survivor_is_counted_and_named(tmp_path: Path) -> None:
    """A row in which nothing fails is neither killed nor not run."""
    page = tmp_path / "kills.md"
    KillsPage(page, "before").note(FIRST, ["numerics.match_float64"])
    after = KillsPage(page, "today")
    after.note(SECOND, [])
    assert after.survivors() == [SECOND]
    rows = len(catalog.pairs())
    assert after.counts() == (
        f"{len(catalog.MUTANTS)} mutants in {rows} rows: 1 killed, 1 survive, {rows - 2} not run yet. "
        "Suite `today` judged 1 of them, earlier suites 1."
    )


def test_every_row_of_the_published_page_was_run() -> None:
    """The page has a row for each mutant and layout, in each of which some check failed."""
    page = KillsPage(PAGE, "today")
    assert set(page.rows) == {(one.id, layout) for one, layout in catalog.pairs()}
    assert not page.survivors() and NOT_RUN not in PAGE.read_text(encoding="utf-8").partition("## Matrix")[2]
