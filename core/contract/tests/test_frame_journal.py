"""The journal: a run goes on where another ended, and only over the same files and suite."""

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
    """A journal of the reference, begun."""
    made = Journal(tmp_path / "run.jsonl")
    made.begin(JUDGED, HERE)
    return made


def passed(number: int) -> dict[str, object]:
    """A result of the suite's item of that number."""
    item = all_items()[number]
    return Result(item.id, item.tier.value, Outcome.PASSED).as_json()


def test_a_later_run_has_what_was_decided(journal: Journal) -> None:
    """Results stay; each run is counted by what it decided last."""
    journal.note(passed(0))
    journal.note(passed(1))
    journal.begin(JUDGED, HERE)
    journal.note(passed(2))
    assert list(journal.ended()) == [item.id for item in all_items()[:3]]
    assert [run["items"] for run in journal.runs()] == [2, 1]
    assert journal.runs()[0]["date"] == "2026-01-01"


def test_one_run_that_proved_its_tree_speaks_for_all(journal: Journal) -> None:
    """A device that is only lent knows no history; the machine with the repository ran the same code."""
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
def test_results_of_other_code_are_refused(journal: Journal, other: dict[str, object], words: str) -> None:
    """With what differs, and what to do; the file stays as it is."""
    before = journal.path.read_text()
    with pytest.raises(ForeignJournal, match=f"{words}; name a new file"):
        journal.begin(other, HERE)
    assert journal.path.read_text() == before


def test_another_file_is_left_alone(tmp_path: Path) -> None:
    """A run is not appended to somebody's notes."""
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
def test_a_damaged_journal_is_refused(tmp_path: Path, row: dict[str, object]) -> None:
    """Lines that are JSON and no journal's end a run before its first item; the file stays as it is."""
    path = tmp_path / "run.jsonl"
    first = [] if "journal" in row else [{"journal": JUDGED}, {"run": HERE}]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*first, row, {"item": "y", "outcome": "passed"}]))
    before = path.read_text()
    with pytest.raises(ForeignJournal, match=r"damaged|other than it was"):
        Journal(path).begin(JUDGED, HERE)
    assert path.read_text() == before


def test_what_was_under_way_in_an_ended_run_is_run_again(journal: Journal) -> None:
    """An item that a cut run began is no failure of the next one; one that this run began is."""
    first, second = (item.id for item in all_items()[:2])
    journal.note({"started": first})
    with journal.path.open("a") as file:
        file.write('{"item": "cut')
        file.write("\n")
    journal.begin(JUDGED, HERE)
    assert not journal.ended() and not journal.fail_unfinished("died")
    journal.note({"started": second})
    assert journal.fail_unfinished("died")
    died = journal.ended()[second]
    assert died.outcome is Outcome.FAILED
    assert died.message.endswith(f"draftmark contract reference --item '{second}'")


def test_a_second_command_runs_what_is_left(tmp_path: Path, draftmark: Callable[..., Any]) -> None:
    """One check, then that and another one: the verdict has both runs, and each item once."""
    command = ("contract", "reference", "--tier", "sizing", "--journal", tmp_path / "run.jsonl", "-k")
    assert draftmark(*command, "describes_itself").code == 0
    record = tmp_path / "verdict.json"
    assert draftmark(*command, "describes_itself or siblings_are_declared", "--json", record).code == 0
    found = json.loads(record.read_text())
    assert [run["items"] for run in found["runs"]] == [1, 1]
    assert [row["item"] for row in found["results"]] == [
        "load.describes_itself[plugin]",
        "load.siblings_are_declared[plugin]",
    ]
