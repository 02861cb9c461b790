"""Tests of the environment of worker processes."""

from __future__ import annotations

import os

import pytest

from draftmark_contract.check import Tier
from draftmark_contract.runner.plugin import THREADS, environment

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
