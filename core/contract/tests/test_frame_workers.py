"""Tests of worker processes: each gets one item at a time, and few threads."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftmark_contract.runner.child import THREADS, command, environment
from draftmark_contract.runner.options import RunOptions

CORES = 16


def threads(monkeypatch: pytest.MonkeyPatch, workers: int, tier: str) -> int:
    """Return the number of threads per process on a machine with `CORES` cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: CORES)
    monkeypatch.delenv(THREADS, raising=False)
    return int(environment(RunOptions("reference", tier, workers=workers))[THREADS])


def test_worker_gets_one_item_at_a_time(tmp_path: Path) -> None:
    """pytest-xdist gives a worker one item at a time; without workers the command has no option of pytest-xdist."""
    shared = command(RunOptions("reference", workers=3), tmp_path, tmp_path / "journal.jsonl")
    alone = command(RunOptions("reference"), tmp_path, tmp_path / "journal.jsonl")
    assert shared == [*alone, "-n", "3", "--maxschedchunk=1"]


def test_host_tier_uses_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of the sizing and host tiers use one thread, because their tensors are tiny."""
    assert [threads(monkeypatch, workers, tier) for workers in (0, 2) for tier in ("sizing", "host")] == [1, 1, 1, 1]


@pytest.mark.parametrize(("workers", "each"), [(0, CORES), (3, 5), (14, 1), (40, 1)])
def test_workers_of_the_device_tier_share_the_cores(workers: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of the device tier divide the cores, with at least one thread each."""
    assert threads(monkeypatch, workers, "device") == each


def test_callers_number_of_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the caller has set OMP_NUM_THREADS, that number is used."""
    monkeypatch.setenv(THREADS, "7")
    assert environment(RunOptions("reference", workers=2))[THREADS] == "7"


def test_items_compile_only_what_they_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a backend compiles nothing ahead of time in items, unless the caller asks for it."""
    options = RunOptions("reference", workers=2)
    monkeypatch.delenv("DRAFTMARK_PREPARE", raising=False)
    assert environment(options)["DRAFTMARK_PREPARE"] == "0"
    monkeypatch.setenv("DRAFTMARK_PREPARE", "1")
    assert environment(options)["DRAFTMARK_PREPARE"] == "1"
