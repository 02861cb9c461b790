"""Tests of the machine facts in a record: date, versions, and the device with its driver."""

from __future__ import annotations

import datetime

import pytest
import torch

from draftmark_contract.runner import machine


def test_run_has_date_and_versions() -> None:
    """A run records the UTC date, Python, and required packages; it has a device only if one is named."""
    here = machine.machine_of("reference")
    assert datetime.date.fromisoformat(here["date"]).isoformat() == here["date"]
    assert {"draftmark", "draftmark-contract", "torch"} <= set(here["versions"])
    assert "device" not in here
    assert machine.machine_of("reference", "cpu")["device"]["kind"] == "cpu"


def test_cuda_device_has_driver_and_cuda_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device is recorded with name, driver and CUDA version; an undetectable driver is "unknown"."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(machine, "DRIVER_QUERY", ("echo", "570.1"))
    assert machine.device_facts("cuda:1") == {"kind": "cuda", "name": "GPU 1", "driver": "570.1", "cuda": "12.8"}
    monkeypatch.setattr(machine, "DRIVER_QUERY", ("no-such-command",))
    assert machine.device_facts("cuda")["driver"] == "unknown"
