"""Recorded verdicts under benchmarks/results: whole, clean, and of the plugin's files as they are now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import draftmark
from draftmark_contract.runner.verdict import stale

RECORDS = sorted((Path(__file__).parent.parent / "benchmarks" / "results").glob("contract-*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_a_recorded_verdict_is_of_todays_files(path):
    """A record names its commit, a clean tree and its item count, and is refused once the plugin's files change."""
    record = json.loads(path.read_text())
    assert record["verdict"] == "conforms", record["line"]
    assert record["source"]["commit"] and record["source"]["clean"], "record it from a clean tree"
    assert record["items"] == sum(record["denominator"].values())
    reasons = stale(record, draftmark.load(record["backend"]))
    assert not reasons, f"{path.name} is out of date: {reasons}; run the contract again and record it"


def test_a_change_of_the_plugins_files_is_seen(tmp_path):
    """The same record with another hash of the files is refused, with a sentence."""
    record = json.loads(RECORDS[0].read_text())
    record["source"]["files_sha256"] = "0" * 64
    assert stale(record, draftmark.load(record["backend"]))


def test_there_is_a_record_of_every_backend_that_was_judged():
    """Those that README says have a verdict on today's files, device tier included."""
    judged = ("reference", "cuda_triton", "cuda_trtllm", "cuda_flashinfer")
    assert {f"contract-{name}-h200" for name in judged} <= {path.stem for path in RECORDS}
