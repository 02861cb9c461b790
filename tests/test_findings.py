"""The page of findings is made from its data and the recorded runs."""

from __future__ import annotations

import json

from draftmark_contract.judge.engines import engines
from draftmark_contract.judge.rules import rules
from tools.docs import findings


def test_the_page_is_what_its_data_says() -> None:
    """docs/findings.md is what docs/findings.toml and docs/findings-run.json make."""
    assert findings.PAGE.read_text(encoding="utf-8") == findings.page(findings.read(), findings.kept())


def test_each_finding_was_run_and_ended_as_it_says() -> None:
    """A finding ran wrong in its release, and right in the release that it names as right."""
    runs = findings.kept()["findings"]
    for one in findings.read():
        assert runs[one.id][one.release]["outcome"] == "wrong", one.id
        assert not one.right or runs[one.id][one.right]["outcome"] == "right", one.id
    assert set(runs) == {one.id for one in findings.read()}


def test_what_was_seen_on_a_gpu_is_recorded() -> None:
    """A finding of a GPU is wrong in the recorded verdict of that machine, with the same numbers."""
    recorded = {
        (target["target"], said["item"]): said
        for file in (findings.DOCS.parent / "benchmarks" / "results").glob("judge-*.json")
        for target in json.loads(file.read_text(encoding="utf-8"))["targets"]
        for said in target["wrong"]
    }
    for one in findings.read():
        if one.device:
            said = recorded[one.target, one.item]
            rows, _, number = one.got.partition(": ")
            assert rows in said["said"] and number in said["got"] and said["seen_as"] == "defect", one.id


def test_each_command_names_a_backend_and_a_rule() -> None:
    """The backend is a target of its engine, and the rule is one of the contract."""
    known = engines()
    for one in findings.read():
        name, target = one.target.split(":")
        if name in known:
            assert target in {info.name for info in known[name].targets()}, one.id
        assert one.rule in rules() and one.state in ("fixed", "open", "unmerged", "unreported"), one.id


def test_what_is_known_of_a_run_is_shown() -> None:
    """A finding without a run is marked, and a release without a run is not named as right."""
    one = findings.read()[0]
    page = findings.page([one], {"findings": {}, "verdicts": {}})
    assert "# not run" in page and "| – |" in page and one.command() in page
