"""Tests of docs/findings.md, a list of wrong results in released engines: it equals its data and recorded runs."""

from __future__ import annotations

import json

from draftmark_contract.judge.engines import engines
from draftmark_contract.judge.rules import rules
from tools.docs import findings


def test_page_equals_its_data() -> None:
    """docs/findings.md is the page made from docs/findings.toml and docs/findings-run.json."""
    assert findings.PAGE.read_text(encoding="utf-8") == findings.page(findings.read(), findings.kept())


def test_each_finding_has_its_recorded_outcome() -> None:
    """Each finding's run is recorded as failed in its release, and as passed in the release that fixed it."""
    runs = findings.kept()["findings"]
    for one in findings.read():
        assert runs[one.id][one.release]["outcome"] == "failed", one.id
        assert not one.right or runs[one.id][one.right]["outcome"] == "passed", one.id
    assert set(runs) == {one.id for one in findings.read()}


def test_gpu_findings_are_recorded() -> None:
    """A finding on a GPU is recorded as wrong in that GPU's verdict, with the same numbers."""
    recorded = {
        (target["target"], wrong["item"]): wrong
        for file in (findings.DOCS.parent / "benchmarks" / "results").glob("judge-*.json")
        for target in json.loads(file.read_text(encoding="utf-8"))["targets"]
        for wrong in target["wrong"]
    }
    for one in findings.read():
        if one.device:
            wrong = recorded[one.target, one.item]
            rows, _, number = one.got.partition(": ")
            assert rows in wrong["said"] and number in wrong["got"] and wrong["seen_as"] == "defect", one.id


def test_each_command_names_a_backend_and_a_rule() -> None:
    """Each finding names a backend that its engine has, and a rule of the contract."""
    known = engines()
    for one in findings.read():
        name, target = one.target.split(":")
        if name in known:
            listed = {info.name for info in known[name].targets()}
            assert target in listed or (one.package and target == "CUSTOM"), one.id
        assert one.rule in rules() and one.state in ("fixed", "open", "unmerged", "unreported"), one.id


def test_finding_without_a_run_is_marked() -> None:
    """A finding that was not run is marked on the page, and a release that was not run is not named as right."""
    one = findings.read()[0]
    page = findings.page([one], {"findings": {}, "verdicts": {}})
    assert "# not run" in page and "|–|" in page and one.command() in page
