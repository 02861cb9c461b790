"""Tests that a record depends neither on the order of items nor on the number of processes."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from verdicts import judge

from draftmark import load
from draftmark_contract.check import Tier
from draftmark_contract.runner.outputs import write_outputs
from draftmark_contract.runner.plugin import PluginSubject, opening
from draftmark_contract.runner.run import RunOptions, run

SUBSET = "load and mandatory or describes_itself or overflow and target or any_grad_mode and small"


def _recorded(verdict: Any, path: Path) -> dict[str, Any]:
    """Write a record and return it without what differs between two runs: times and machines."""
    assert write_outputs(verdict, str(path)) == []
    record: dict[str, Any] = json.loads(path.read_text())
    for row in record["results"]:
        del row["seconds"]
    return {name: value for name, value in record.items() if name != "runs"}


@pytest.mark.long
def test_record_does_not_depend_on_order(tmp_path: Path) -> None:
    """A run on two workers gives the verdict and outcomes of a shuffled run in one process."""
    options = RunOptions(Tier.HOST.includes, k=SUBSET, workers=2)
    ran = run("reference", opening("reference"), options, "draftmark contract")
    items = [one.item for one in ran.results]
    assert {one.tier for one in ran.results} == {"sizing", "host"} and len(items) > 30 and not ran.error
    random.Random(7).shuffle(items)
    subject = PluginSubject(load("reference"))
    shuffled = judge(subject.backend, [subject.run(item) for item in items])
    assert _recorded(shuffled, tmp_path / "shuffled.json") == _recorded(ran, tmp_path / "ran.json")
