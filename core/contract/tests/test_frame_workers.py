"""Tests of worker processes: their environment, and errors that are not the backend's."""

from __future__ import annotations

import io
import json
import os
from typing import Any, ClassVar

import pytest

from draftmark_contract.check import Tier
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.plugin import THREADS, environment
from draftmark_contract.runner.subject import Kind, Listed, Opened
from draftmark_contract.runner.worker import work

CORES = 16


def threads(monkeypatch: pytest.MonkeyPatch, workers: int, tier: str) -> int:
    """Return the number of threads per process on a machine with `CORES` cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)
    monkeypatch.delenv(THREADS, raising=False)
    return int(environment(Tier(tier), workers)[THREADS])


def test_host_tier_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the sizing and host tiers use one thread, because their tensors are tiny."""
    assert [threads(monkeypatch, workers, tier) for workers in (1, 2) for tier in ("sizing", "host")] == [1, 1, 1, 1]


@pytest.mark.parametrize(("workers", "each"), [(1, CORES), (3, 5), (14, 1), (40, 1)])
def test_workers_of_the_device_tier_share_the_cores(workers: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the device tier divide the cores, with at least one thread each."""
    assert threads(monkeypatch, workers, "device") == each


def test_callers_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the caller has set OMP_NUM_THREADS, that number is used."""
    monkeypatch.setenv(THREADS, "7")
    assert environment(workers=2)[THREADS] == "7"


def test_items_compile_only_what_they_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a backend compiles nothing ahead of time in items, unless the caller asks for it."""
    monkeypatch.delenv("DRAFTMARK_PREPARE", raising=False)
    assert environment()["DRAFTMARK_PREPARE"] == "0"
    monkeypatch.setenv("DRAFTMARK_PREPARE", "1")
    assert environment()["DRAFTMARK_PREPARE"] == "1"


class BrokenSuite:
    """Subject that the suite itself cannot run or list."""

    opened = Opened("broken", Kind.PLUGIN, "draftmark contract broken")
    left_out: ClassVar[dict[str, str]] = {}

    def items(self) -> list[Listed]:
        """Raise an error."""
        raise KeyError("no list")

    def run(self, item: str) -> Result:
        """Raise an error for the item "broken"; pass every other item."""
        if item == "broken":
            raise RuntimeError("a broken message")
        return Result(item, "host", Outcome.PASSED)

    def lost(self) -> bool:
        """Return False."""
        return False


def open_subject() -> BrokenSuite:
    """Return the subject, as a worker process opens it."""
    return BrokenSuite()


@pytest.mark.parametrize(
    ("command", "error"),
    [({"run": "broken"}, "RuntimeError: a broken message"), ({"list": None}, "KeyError: 'no list'")],
    ids=["run", "list"],
)
def test_error_of_the_suite_stops_the_run(command: dict[str, Any], error: str) -> None:
    """An error outside of an item's check is no result of the backend: the process names it and ends."""
    rows = [{"open": {"module": __name__, "arguments": {}}}, {"run": "a[b]"}, command]
    answers = io.StringIO()
    with pytest.raises(Exception, match=r"broken|no list"):
        work(io.StringIO("".join(json.dumps(row) + "\n" for row in rows)), answers)
    opened, passed, stopped = map(json.loads, answers.getvalue().splitlines())
    assert opened["opened"]["name"] == "broken" and passed["ended"]["result"]["outcome"] == "passed"
    assert stopped == {"stopped": f"the suite raised an internal error: {error}"}
