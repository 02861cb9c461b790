"""Tests of the page of findings: it is made from its data and the recorded runs."""

from __future__ import annotations

import json

from draftmark_contract.judge.engines import engines
from draftmark_contract.judge.rules import rules
from tools.docs import findings


def test_page_equals_its_data() -> None:
    """docs/findings.md is the page made from docs/findings.toml and docs/findings-run.json."""
    assert findings.PAGE.read_text(encoding="utf-8") == findings.page(findings.read(), findings.kept())


def test_each_finding_has_its_recorded_outcome() -> None:
    """A finding ran wrong in its release, and right in the release that it names as right."""
    runs = findings.kept()["findings"]
    for one in findings.read():
        assert runs[one.id][one.release]["outcome"] == "wrong", one.id
        assert not one.right or runs[one.id][one.right]["outcome"] == "right", one.id
    assert set(runs) == {one.id for one in findings.read()}


def test_gpu_findings_are_recorded() -> None:
    """A finding of a GPU is wrong in the recorded verdict of that machine, with the same numbers."""
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
    """Each finding's backend is a target of its engine, and its rule is a rule of the contract."""
    known = engines()
    for one in findings.read():
        name, target = one.target.split(":")
        if name in known:
            assert target in {info.name for info in known[name].targets()}, one.id
        assert one.rule in rules() and one.state in ("fixed", "open", "unmerged", "unreported"), one.id


def test_finding_without_a_run_is_marked() -> None:
    """A finding without a run is marked, and a release without a run is not named as right."""
    one = findings.read()[0]
    page = findings.page([one], {"findings": {}, "verdicts": {}})
    assert "# not run" in page and "| – |" in page and one.command() in page
