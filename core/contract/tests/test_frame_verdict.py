"""The verdict: its words follow from what ran, and a recorded one goes stale when the plugin changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from draftmark import load
from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR
from draftmark_contract.check import Tier
from draftmark_contract.runner import verdict as module
from draftmark_contract.runner.item import Outcome, Result, all_items
from draftmark_contract.runner.verdict import Verdict, judge, stale

VERSION = f"{CONTRACT_MAJOR}.{CONTRACT_MINOR}"


@pytest.fixture(scope="module")
def passed() -> Verdict:
    """Everything of the sizing tier passed."""
    results = [Result(item.id, item.tier.value, Outcome.PASSED) for item in all_items((Tier.SIZING,))]
    return judge("reference", load("reference"), results)


def test_tier_that_did_not_run_is_named(passed: Verdict) -> None:
    """The line carries the whole denominator and what was not run."""
    total = len(all_items())
    assert passed.conforms
    assert passed.line.startswith(
        f"reference conforms to draftmark contract {VERSION}: {len(passed.results)} of {total} items"
    )
    assert f"not run: host ({passed.denominator['host']} items), device" in passed.line


def test_one_failure_is_enough(passed: Verdict) -> None:
    """A failed item, a known failure and an upcoming one are counted apart; only the first denies conformance."""
    first, second, third, *rest = passed.results
    changed = replace(
        passed,
        results=(
            replace(first, outcome=Outcome.FAILED),
            replace(second, outcome=Outcome.KNOWN),
            replace(third, outcome=Outcome.UPCOMING),
            *rest,
        ),
    )
    assert not changed.conforms
    assert "does not conform" in changed.line
    assert "1 failed; 1 known failures; 1 upcoming" in changed.line
    assert replace(changed, results=(*changed.results[1:], first)).conforms


def test_some_items_give_no_verdict(passed: Verdict) -> None:
    """A selection (-k) neither conforms nor fails."""
    few = judge("reference", load("reference"), passed.results[:5])
    assert not few.conforms
    assert "has no verdict on" in few.line
    assert "only 5 items selected" in few.line


def test_interpreted_items_are_counted(passed: Verdict) -> None:
    """Items that ran without the backend's kernels show in the line."""
    results = [replace(passed.results[0], marks=("interpreted",)), *passed.results[1:]]
    assert "1 by the metadata interpreter" in judge("reference", load("reference"), results).line


def test_record_has_a_schema_and_reads_back(passed: Verdict, tmp_path: Path) -> None:
    """The JSON names schema, contract, source and counts."""
    passed.write(tmp_path / "verdict.json")
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert (record["schema"], record["verdict"]) == (1, "conforms")
    assert record["contract"] == [CONTRACT_MAJOR, CONTRACT_MINOR]
    assert record["items"] == sum(record["denominator"].values()) == len(all_items())
    assert set(record["source"]) == {"distribution", "version", "commit", "clean", "files_sha256"}


def test_recorded_verdict_goes_stale(passed: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed files, a dirty tree and another item count each refuse a record."""
    backend = load("reference")
    record = passed.as_json()
    record["source"] = {**record["source"], "clean": True}
    assert stale(record, backend) == []
    assert "uncommitted" in stale({**record, "source": {**record["source"], "clean": False}}, backend)[0]
    assert "items now" in stale({**record, "items": 3}, backend)[0]
    monkeypatch.setattr(module, "hash_of", lambda folder: "changed")
    assert stale(record, backend) == ["the plugin's files have changed since"]
