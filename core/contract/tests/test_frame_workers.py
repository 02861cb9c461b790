"""Processes that run items: what each is given at a time, and how many threads it has."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftmark_contract.runner.options import RunOptions
from draftmark_contract.runner.run import THREADS, _command, _environment

CORES = 16


def threads(monkeypatch: pytest.MonkeyPatch, workers: int, tier: str) -> int:
    """Of each process of a run on a machine of CORES cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)
    monkeypatch.delenv(THREADS, raising=False)
    return int(_environment(RunOptions("reference", tier, workers=workers))[THREADS])


def test_a_worker_gets_one_item_at_a_time(tmp_path: Path) -> None:
    """Long items that lie in a row are shared; without workers no option of pytest-xdist is named."""
    shared = _command(RunOptions("reference", workers=3), tmp_path, tmp_path / "journal.jsonl")
    alone = _command(RunOptions("reference"), tmp_path, tmp_path / "journal.jsonl")
    assert shared == [*alone, "-n", "3", "--maxschedchunk=1"]


def test_the_host_tier_multiplies_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of tiny products only wait for each other, however many workers there are."""
    assert [threads(monkeypatch, workers, tier) for workers in (0, 2) for tier in ("sizing", "host")] == [1, 1, 1, 1]


@pytest.mark.parametrize(("workers", "each"), [(0, CORES), (3, 5), (14, 1), (40, 1)])
def test_workers_of_the_device_tier_share_the_cores(workers: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they have no more threads than the machine has cores, or one each."""
    assert threads(monkeypatch, workers, "device") == each


def test_the_callers_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sets it knows why."""
    monkeypatch.setenv(THREADS, "7")
    assert _environment(RunOptions("reference", workers=2))[THREADS] == "7"
