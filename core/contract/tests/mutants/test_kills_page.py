"""Tests of the record of kills and its page."""

from __future__ import annotations

from pathlib import Path

from . import catalog
from .kills_page import DATA, NOT_RUN, KillsPage

FIRST, SECOND = [(one.id, layout) for one, layout in catalog.pairs() if one.id[0] == "R"][:2]


def test_rows_that_no_suite_has_judged_are_due_first(tmp_path: Path) -> None:
    """Rows without a result run first, then rows of earlier suites. Rows that today's suite judged do not run."""
    record = tmp_path / "kills.json"
    KillsPage(record, "before").note(FIRST, ["numerics.match_float64"])
    today = KillsPage(record, "today")
    assert len(today.due()) == len(catalog.pairs()) and today.due()[-1] == FIRST
    today.note(SECOND, ["guards.find_no_poison_read"])
    assert SECOND not in KillsPage(record, "today").due()


def test_a_row_keeps_its_suite_when_others_run(tmp_path: Path) -> None:
    """The record keeps the checks of each row and the suite that judged it."""
    record = tmp_path / "kills.json"
    KillsPage(record, "before").note(FIRST, ["numerics.match_float64", "late.rounds_outlive_their_backend"])
    KillsPage(record, "between").note(SECOND, [])
    again = KillsPage(record, "today")
    again.save()
    rows = KillsPage(record, "today").rows
    assert rows == again.rows
    assert rows[FIRST].checks == ("numerics.match_float64", "late.rounds_outlive_their_backend")
    assert (rows[FIRST].suite, rows[SECOND].suite) == ("before", "between")


def test_a_survivor_is_counted_and_named(tmp_path: Path) -> None:
    """A row in which no check fails counts as a survivor."""
    record = tmp_path / "kills.json"
    KillsPage(record, "before").note(FIRST, ["numerics.match_float64"])
    after = KillsPage(record, "today")
    after.note(SECOND, [])
    assert after.survivors() == [SECOND]
    rows = len(catalog.pairs())
    assert after.counts() == (
        f"{len(catalog.MUTANTS)} mutants in {rows} rows: 1 killed, 1 survive, {rows - 2} not run yet. "
        "Suite `today` judged 1 of them, earlier suites 1."
    )


def test_every_mutant_has_a_recorded_kill() -> None:
    """kills.json has one row for each mutant and layout. Each row names a check that failed, except known gaps."""
    kills = KillsPage(DATA, "today")
    assert set(kills.rows) == {(one.id, layout) for one, layout in catalog.pairs()}
    assert {one for one, _ in kills.survivors()} == set(catalog.SURVIVORS)


def test_the_page_has_a_row_for_each_result() -> None:
    """The page names the checks of the record, and no row is missing."""
    kills = KillsPage(DATA, "today")
    page = kills.page()
    assert all(f" | {layout} | {row.cell} |" in page for (_, layout), row in kills.rows.items())
    assert NOT_RUN not in page.partition("## Matrix")[2]
