"""Tests of the recorded verdicts under benchmarks/results and of README's table of them.

A verdict that was recorded with older code is a warning here and an error in a release.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from draftmark_contract.profiles import Profile
from draftmark_contract.runner.record import MOST_BYTES, SCHEMA
from draftmark_contract.runner.staleness import standing
from draftmark_contract.runner.table import BEGIN, END, table, written
from draftmark_contract.runner.table import main as write_table

ROOT = Path(__file__).parent.parent
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("contract-*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_recorded_verdict_is_complete_and_short(path):
    """A recorded verdict names all tiers and known profiles, its counts add up, and it lists items that did not pass.

    The record of a run that was stopped early has no failure and no verdict.
    """
    record = json.loads(path.read_text())
    assert record["schema"] == SCHEMA and record["counts"]["failed"] == 0
    if record["counts"]["not_run"]:
        assert record["verdict"] == "has no verdict" and record["line"].endswith("not run")
    else:
        assert record["tiers_run"] == list(record["items"])
        assert record["verdict"] in ("conforms", "conforms with known failures"), record["line"]
    assert sum(record["counts"].values()) == sum(record["items"].values())
    assert set(record["profiles"]) <= set(Profile) and record["source"]["commit"]
    by_check = [sum(counts.get(name, 0) for counts in record["checks"].values()) for name in ("passed", "refused")]
    assert by_check == [record["counts"]["passed"], record["counts"]["refused"]]
    listed = sum(row["items"] for row in record["not_passed"])
    assert listed == sum(record["counts"][name] for name in ("declared", "unjudged", "failed"))
    assert path.stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_stale_verdict_is_a_warning(path):
    """A verdict recorded with older code gives a warning with the reasons, not an error."""
    reasons = standing(path)
    if reasons:
        warnings.warn(f"{path.name} is stale: {'; '.join(reasons)}; run the contract and record it again", stacklevel=1)


def test_readme_shows_the_records():
    """README's table equals the table that draftmark_contract.runner.table makes from the records."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert written(text, table(RECORDS, ROOT)) == text


def test_table_has_four_columns():
    """Each row has the backend, the linked verdict with the contract's version, the device, and the date."""
    heads, _, *rows = (line.strip("| ").split(" | ") for line in table(RECORDS, ROOT).splitlines())
    assert heads == ["backend", "verdict", "device", "date"]
    for path, (backend, verdict, device, date) in zip(RECORDS, rows, strict=True):
        record = json.loads(path.read_text())
        assert backend == f"`{record['backend']}`"
        link = path.relative_to(ROOT).as_posix()
        assert verdict == f"[{record['verdict']}]({link}), contract {record['contract']}"
        assert device.startswith("NVIDIA ") and len(date) == len("2026-11-23")


def test_every_judged_backend_has_a_record():
    """Every backend that has run on a GPU has a recorded verdict from an H200."""
    judged = ("reference", "cuda_triton", "cuda_trtllm", "cuda_flashinfer")
    assert {f"contract-{name}-h200" for name in judged} <= {path.stem for path in RECORDS}


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", "{}", '{"backend": 3}', '{"backend": "reference", "runs": 3}', "\x00"]
)
def test_damaged_record_is_one_sentence(tmp_path, capsys, text):
    """For a damaged record, the command prints one sentence and writes no table; the record counts as stale."""
    path, page = tmp_path / "record.json", tmp_path / "page.md"
    path.write_text(text)
    page.write_text(f"{BEGIN}\n{END}\n")
    before = page.read_text()
    assert write_table([str(path), "--write", str(page)]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n"), page.read_text()) == ("", 1, before)
    assert "is not a verdict record" in printed.err
    assert len(standing(path)) == 1
