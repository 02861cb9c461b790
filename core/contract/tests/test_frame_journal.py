"""The journal: a run goes on where another ended, and only over the same files and suite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftmark.registry import load
from draftmark_contract.runner.item import Outcome, Result, all_items
from draftmark_contract.runner.journal import ForeignJournal, Journal, Judged
from draftmark_contract.runner.known import hash_of, plugin_folder


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """A journal of the reference, begun."""
    made = Journal(tmp_path / "run.jsonl")
    made.begin("reference")
    return made


def passed(number: int) -> dict[str, object]:
    """A result of the suite's item of that number."""
    item = all_items()[number]
    return Result(item.id, item.tier.value, Outcome.PASSED).as_json()


def test_the_hash_is_that_of_the_verdict() -> None:
    """Found without importing the plugin, and yet of the same files."""
    assert Judged.now("reference").files_sha256 == hash_of(plugin_folder(load("reference")))


def test_a_later_run_has_what_was_decided(journal: Journal) -> None:
    """Results stay; each run is counted by what it decided last."""
    journal.note(passed(0))
    journal.note(passed(1))
    journal.begin("reference")
    journal.note(passed(2))
    assert list(journal.ended()) == [item.id for item in all_items()[:3]]
    assert [run["items"] for run in journal.runs()] == [2, 1]
    assert journal.runs()[0]["versions"]["draftmark"]


@pytest.mark.parametrize("field, value", [("files_sha256", "0" * 64), ("backend", "other"), ("items", 1)])
def test_results_of_other_code_are_refused(journal: Journal, field: str, value: object) -> None:
    """With what differs, and what to do; the file stays as it is."""
    first, *rest = journal.path.read_text().splitlines()
    row = json.loads(first)
    row["journal"][field] = value
    journal.path.write_text("\n".join([json.dumps(row), *rest]) + "\n")
    before = journal.path.read_text()
    with pytest.raises(ForeignJournal, match=f"{field} is .* now .*; name a new file"):
        journal.begin("reference")
    assert journal.path.read_text() == before


def test_what_was_under_way_in_an_ended_run_is_run_again(journal: Journal) -> None:
    """An item that a cut run began is no failure of the next one; one that this run began is."""
    first, second = (item.id for item in all_items()[:2])
    journal.note({"started": first})
    with journal.path.open("a") as file:
        file.write('{"item": "cut')
        file.write("\n")
    journal.begin("reference")
    assert not journal.ended() and not journal.fail_unfinished("died")
    journal.note({"started": second})
    assert journal.fail_unfinished("died")
    assert journal.ended()[second].outcome is Outcome.FAILED


def test_a_second_command_runs_what_is_left(tmp_path: Path) -> None:
    """Two checks, then the whole sizing tier but the proofs' items: the verdict has both runs."""
    command = [sys.executable, "-m", "draftmark.cli", "contract", "reference", "--tier", "sizing"]
    command += ["--journal", str(tmp_path / "run.jsonl")]
    few = ["-k", "answers_repeatably"]
    subprocess.run([*command, *few], check=True, capture_output=True)
    record = tmp_path / "verdict.json"
    subprocess.run([*command, "-k", "load", "--json", str(record)], check=True, capture_output=True)
    runs = json.loads(record.read_text())["runs"]
    loads = [item for item in all_items() if item.id.startswith("load.")]
    repeated = [item for item in loads if "answers_repeatably" in item.id]
    assert [run["items"] for run in runs] == [len(repeated), len(loads) - len(repeated)]
