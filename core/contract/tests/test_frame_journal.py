"""Tests of the journal of a contract run: a run resumes where an earlier one ended, if the code is equal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftmark_contract.runner.item import all_items
from draftmark_contract.runner.journal import ForeignJournal, Journal
from draftmark_contract.runner.outcome import Outcome, Result

JUDGED = {"backend": "reference", "identity": {"plugin": "a", "core": "b", "suite": "c"}}
HERE = {"date": "2026-01-01", "source": {"commit": "1", "tree": "unverified"}}


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Return a journal with one started run of the reference backend."""
    made = Journal(tmp_path / "run.jsonl")
    made.begin(JUDGED, HERE)
    return made


def passed(number: int) -> dict[str, object]:
    """Return a "passed" result of the contract's item with this number."""
    item = all_items()[number]
    return Result(item.id, item.tier.value, Outcome.PASSED).as_json()


def test_later_run_keeps_earlier_results(journal: Journal) -> None:
    """A later run keeps earlier results, and the journal lists each run with the number of its results."""
    journal.note(passed(0))
    journal.note(passed(1))
    journal.begin(JUDGED, HERE)
    journal.note(passed(2))
    assert list(journal.ended()) == [item.id for item in all_items()[:3]]
    assert [run["items"] for run in journal.runs()] == [2, 1]
    assert journal.runs()[0]["date"] == "2026-01-01"


def test_source_of_a_verified_run_applies_to_all(journal: Journal) -> None:
    """If one run had a clean git tree, its commit applies to all runs of the journal, since all ran equal code."""
    journal.note(passed(0))
    assert journal.source() is None
    proved = {"commit": "1", "tree": "clean"}
    journal.begin(JUDGED, {**HERE, "source": proved})
    journal.note(passed(1))
    journal.begin(JUDGED, HERE)
    journal.note(passed(2))
    assert journal.source() == proved


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({**JUDGED, "backend": "other"}, "backend is 'reference', now 'other'"),
        ({**JUDGED, "identity": {**JUDGED["identity"], "core": "x"}}, "the code of 'core' has changed"),  # type: ignore[dict-item]
        ({**JUDGED, "identity": {"plugin": "a", "core": "b"}}, "the code of 'suite' has changed"),
    ],
    ids=["backend", "code", "part"],
)
def test_results_of_other_code_are_rejected(journal: Journal, other: dict[str, object], words: str) -> None:
    """A journal of other code is rejected with the difference and a remedy, and the journal file does not change."""
    before = journal.path.read_text()
    with pytest.raises(ForeignJournal, match=f"{words}; name a new file"):
        journal.begin(other, HERE)
    assert journal.path.read_text() == before


def test_other_file_is_left_unchanged(tmp_path: Path) -> None:
    """A run rejects a file that is not a journal, and does not change it."""
    notes = tmp_path / "notes.md"
    notes.write_text("# to do\n")
    with pytest.raises(ForeignJournal, match="is no journal of a contract run"):
        Journal(notes).begin(JUDGED, HERE)
    assert notes.read_text() == "# to do\n"


@pytest.mark.parametrize(
    "row",
    [{"journal": 3}, {"journal": None}, {"journal": "ab"}, {"journal": {**JUDGED, "identity": [1]}}, {"run": 3},
     {"run": {"source": 3}}, {"item": [1]}, {"item": "x"}, {"item": "x", "outcome": "bogus", "marks": []},
     {"item": "x", "tier": "host", "outcome": "passed", "marks": [], "colour": "red"}],
    ids=str,
)  # fmt: skip
def test_damaged_journal_is_rejected(tmp_path: Path, row: dict[str, object]) -> None:
    """A file of JSON lines that is not a valid journal is rejected before the first item, and does not change."""
    path = tmp_path / "run.jsonl"
    first = [] if "journal" in row else [{"journal": JUDGED}, {"run": HERE}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*first, row, {"item": "y", "outcome": "passed"}]))
    before = path.read_text()
    with pytest.raises(ForeignJournal, match=r"damaged|has changed"):
        Journal(path).begin(JUDGED, HERE)
    assert path.read_text() == before


def test_torn_line_is_no_result(journal: Journal) -> None:
    """A line that a crash cut short is no result, so its item runs again; the next line is whole."""
    journal.note(passed(0))
    with journal.path.open("a") as file:
        file.write('{"item": "cut')
    journal.begin(JUDGED, HERE)
    journal.note(passed(1))
    assert list(journal.ended()) == [item.id for item in all_items()[:2]]


@pytest.mark.long
def test_second_command_runs_remaining_items(tmp_path: Path, draftmark: Callable[..., Any]) -> None:
    """Two commands with one journal give one verdict, which lists both runs and has each item once."""
    command = ("contract", "reference", "--tier", "sizing", "--journal", tmp_path / "run.jsonl", "--allow-part", "-k")
    assert draftmark(*command, "describes_itself").code == 0
    record = tmp_path / "verdict.json"
    assert draftmark(*command, "describes_itself or siblings_are_declared", "--json", record).code == 0
    found = json.loads(record.read_text())
    assert [run["items"] for run in found["runs"]] == [1, 1]
    assert [row["item"] for row in found["results"]] == [
        "load.describes_itself[plugin]",
        "load.siblings_are_declared[plugin]",
    ]
