"""A record says when and where: the day, versions, the device with its driver."""

from __future__ import annotations

import datetime

import pytest
import torch

from draftmark_contract.runner import machine


def test_a_run_is_dated_and_versioned() -> None:
    """The day in UTC, Python, and what the backend's distribution asks for; a device only where one is named."""
    here = machine.machine_of("reference")
    assert datetime.date.fromisoformat(here["date"]).isoformat() == here["date"]
    assert {"draftmark", "draftmark-contract", "torch"} <= set(here["versions"])
    assert "device" not in here
    assert machine.machine_of("reference", "cpu")["device"]["kind"] == "cpu"


def test_a_cuda_device_comes_with_driver_and_toolkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name, driver and CUDA; a driver that nobody tells is said to be unknown."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(machine, "DRIVER_QUERY", ("echo", "570.1"))
    assert machine.device_facts("cuda:1") == {"kind": "cuda", "name": "GPU 1", "driver": "570.1", "cuda": "12.8"}
    monkeypatch.setattr(machine, "DRIVER_QUERY", ("no-such-command",))
    assert machine.device_facts("cuda")["driver"] == "unknown"
