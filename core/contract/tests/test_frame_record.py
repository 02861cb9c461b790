"""Tests of recorded verdicts: the full form, the short form, and the changes that make a record stale."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from verdicts import backend, verdict

from draftmark_contract.check import Tier
from draftmark_contract.profiles import Profile
from draftmark_contract.runner import staleness
from draftmark_contract.runner.item import Item, all_items
from draftmark_contract.runner.machine import machine_of
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.record import SCHEMA, as_text, full_record, short_record
from draftmark_contract.runner.staleness import main, stale
from draftmark_contract.schema import schema_text

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def short() -> dict[str, Any]:
    """Return the short record of a run of all tiers with a device."""
    made = verdict(tier=Tier.DEVICE)
    return short_record(replace(made, runs=({"date": "2026-01-01", "device": {"name": "some"}},)))


def test_both_forms_read_back(tmp_path: Path) -> None:
    """Both records can be read back: the full one has every item, the short one the counts of every check."""
    made = verdict(lambda item: Outcome.REFUSED if Profile.FP8 in item.needs else None)
    (tmp_path / "full.json").write_text(as_text(full_record(made)))
    (tmp_path / "short.json").write_text(as_text(short_record(made)))
    full, short = (json.loads((tmp_path / name).read_text()) for name in ("full.json", "short.json"))
    assert len(full["results"]) == len(made.results)
    assert full["counts"] == short["counts"] == {
        "passed": made.counts.passed, "refused": made.counts.refused, "declared": 0, "unjudged": 0, "failed": 0,
        "not_run": made.counts.not_run,
    }  # fmt: skip
    assert sum(sum(one.values()) for one in short["checks"].values()) == len(made.results)
    assert short["schema"] == SCHEMA and short["refusals"] == {"why": made.counts.refused}


def _many(item: Item) -> Result | None:
    """Return an outcome for an item of a nearly correct backend: half of the items fail, with long reasons."""
    outcomes = (Outcome.DECLARED, Outcome.UNJUDGED, Outcome.FAILED, *[None] * 3)
    outcome = outcomes[len(item.case.id) % len(outcomes)]
    return Result(item.id, item.tier.value, outcome, "reason " * 60) if outcome else None


def test_short_record_is_bounded(tmp_path: Path) -> None:
    """The short record groups items that did not pass by check and reason, and needs at most 50 KB."""
    worse = {item.id for item in all_items() if item.check.name.startswith(("metadata.", "graphs."))}
    made = verdict(lambda item: _many(item) if item.id in worse else None, Tier.DEVICE)
    found = short_record(made)
    (tmp_path / "record.json").write_text(as_text(found), encoding="utf-8")
    assert (tmp_path / "record.json").stat().st_size <= 50_000
    assert json.loads((tmp_path / "record.json").read_text(encoding="utf-8")) == found
    counted = sum(row["items"] for row in found["not_passed"])
    assert counted == sum(one.outcome is not Outcome.PASSED for one in made.results) > 100


def test_declared_roundoffs_are_in_line_and_records(tmp_path: Path) -> None:
    """Items that were compared with a declared bound are counted in the verdict's line and in both records."""
    mark = "within 5 roundoffs (declared)"
    wide = {item.id for item in all_items((Tier.HOST,)) if item.check.name == "numerics.match_float64"}

    def ending(item: Item) -> Result | None:
        return Result(item.id, item.tier.value, Outcome.PASSED, marks=(mark,)) if item.id in wide else None

    made = verdict(ending)
    assert f"; {len(wide)} items {mark}" in made.line
    for record in (full_record(made), short_record(made)):
        assert record["declared_roundoffs"] == {mark: len(wide)}
        _validate(record)
    assert short_record(verdict())["declared_roundoffs"] == {} and "roundoffs" not in verdict().line


def test_record_is_current_until_something_changes(short: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A record becomes stale when the plugin, core, suite, tiers, device or verdict changes."""
    monkeypatch.setattr(staleness, "verified", lambda record, parts, repository: True)
    loaded = backend()
    assert stale(short, loaded, HERE) == []
    changes = {
        "has schema 1": {"schema": 1},
        "the plugin's code has changed since": {"identity": {**short["identity"], "plugin": "0"}},
        "the core's step path has changed since": {"identity": {**short["identity"], "core": "0"}},
        "the suite has changed since": {"identity": {**short["identity"], "suite": "0"}},
        "tiers run: sizing, host": {"tiers_run": ["sizing", "host"]},
        "lists no device": {"runs": [{"date": "2026-01-01"}]},
        "verdict is 'does not conform' of 'backend'": {"verdict": "does not conform"},
        "verdict is 'conforms' of 'sizing and metadata'": {"of": "sizing and metadata"},
        "backend is 'other'": {"backend": "other"},
    }
    for words, change in changes.items():
        assert words in "; ".join(stale({**short, **change}, loaded, HERE))


def test_unverifiable_commit_makes_a_record_stale(short: dict[str, Any]) -> None:
    """A record is stale unless git history shows that its commit contains the recorded code."""
    claimed = {**short, "source": {"commit": "0123abc", "tree": "clean", "paths": {}}}
    assert "no history here shows that commit 0123abc contains the recorded code" in stale(claimed, backend(), HERE)


def test_strict_needs_one_current_record_of_each_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older record of another device is allowed, but a backend without a current record is an error."""
    for name, backend_name in (("a-new", "a"), ("a-old", "a"), ("b-old", "b")):
        (tmp_path / name).write_text(json.dumps({"backend": backend_name}))
    monkeypatch.setattr(staleness, "standing", lambda path: ["old"] if path.name.endswith("old") else [])
    files = [str(tmp_path / name) for name in ("a-new", "a-old", "b-old")]
    assert [main([*some, "--strict"]) for some in (files[:1], files[:2], files[1:2], files)] == [0, 0, 1, 1]


def test_stale_record_fails_only_with_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints one line for each stale record, and returns an error only with --strict."""
    path = tmp_path / "contract-x.json"
    path.write_text('{"schema": 1, "backend": "reference"}')
    assert (main([str(path)]), main([str(path), "--strict"])) == (0, 1)
    assert capsys.readouterr().out.count("contract-x.json: stale: it has schema 1, not 3") == 2


def _validate(record: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(json.loads(schema_text())).validate(json.loads(json.dumps(record)))


@pytest.mark.parametrize("tier", list(Tier))
def test_records_fit_the_published_schema(tier: Tier) -> None:
    """Full and short records with every outcome are valid against the published JSON schema."""
    made = replace(verdict(_many, tier), runs=({**machine_of("reference", "cpu"), "items": 3},))
    few = replace(made, results=made.results[::40])
    assert {one.outcome for one in few.results} == {one.outcome for one in made.results}
    for record in (full_record(few), short_record(made)):
        _validate(record)
    for wrong in ({"verdict": "fine"}, {"schema": 2}, {"counts": {"passed": -1}}):
        with pytest.raises(jsonschema.ValidationError):
            _validate({**short_record(made), **wrong})


def test_recorded_verdicts_fit_the_published_schema() -> None:
    """Records of earlier versions in this repository are valid against the published JSON schema."""
    records = sorted((HERE.parents[2] / "benchmarks" / "results").glob("contract-*.json"))
    assert records
    for path in records:
        _validate(json.loads(path.read_text(encoding="utf-8")))


def test_schema_is_printed(draftmark: Callable[..., Any]) -> None:
    """`draftmark contract --schema` prints the schema without a backend, and the schema itself is valid."""
    said = draftmark("contract", "--schema")
    assert said.code == 0
    jsonschema.Draft202012Validator.check_schema(json.loads(said.out))
