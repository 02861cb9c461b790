"""Tests of benchmark records and plans, and of the pages made from the records."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tools.docs import results

RESULTS = sorted((Path(__file__).parent.parent / "benchmarks").rglob("*.json"))
FOLDERS = re.compile(r"/(?:root|home|tmp|work|Users|mnt|workspace)/[\w.-]+")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_result_has_no_folder_of_its_machine(path):
    """A benchmark record contains no path of the machine that made it, not even in a traceback."""
    assert not FOLDERS.findall(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def pages():
    """Return every page of results by its file name."""
    return {name: page() for name, page in results.MADE.items()}


@pytest.mark.parametrize("path", sorted(results.RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_every_record_has_a_section(path, pages):
    """Each record's page has its anchor and its commit. Only verdicts of the contract are on another page."""
    page, _, anchor = results.page_of(path).partition("#")
    assert bool(page) != path.name.startswith("contract-")
    if page:
        commit = json.loads(path.read_text(encoding="utf-8")).get("commit")
        assert f"{{#{anchor}}}" in pages[page] and (commit is None or commit[:8] in pages[page])


def test_every_time_of_attention_is_shown(pages):
    """The attention pages have a line for each case of each attention record."""
    shown = pages["results-attention.md"] + pages["results-kernels.md"]
    for path in results.RECORDS.glob("attention-*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        for run in (record, *record.get("later_runs", ())):
            assert all(f"| {row['case']}" in shown for row in run["rows"])


def test_table_states_shared_fields_once():
    """Fields that all rows share are written once above the table; lists of single turns are left out."""
    rows = [{"case": name, "batch": 1, "us": us, "turns": [us]} for name, us in (("a", 1.5), ("b", None))]
    assert results.table(rows).splitlines() == [
        "All rows: batch 1.", "", "| case | us |", "| --- | --- |", "| a | 1.5 |", "| b |  |",
    ]  # fmt: skip


def test_ratio_of_a_time_is_to_the_fastest_other_backend():
    """The ratio is the fastest other time divided by cuda_triton's; marks show backends that do less work."""
    rows = [{"case": "a", "backend": name, "us": us, "tail": tail} for name, us, tail in (
        ("fa3", 12.0, "causal"), ("cuda_triton", 10.0, "exact"), ("xqa", 15.0, "exact"),
    )]  # fmt: skip
    assert results.times(rows).splitlines()[2] == "| a | 10.0 | 12.0 ᶜ | 15.0 | 1.20 |"
