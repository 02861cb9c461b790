"""Tests of the machine facts in a record: date, versions, and the device with its driver."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
import torch

from draftmark_contract.runner import machine, processor


def test_run_has_date_and_versions() -> None:
    """A run records the UTC date, Python and required packages, and a device only if one is named."""
    here = machine.machine_of("reference")
    assert datetime.date.fromisoformat(here["date"]).isoformat() == here["date"]
    assert {"draftmark", "draftmark-contract", "torch"} <= set(here["versions"])
    assert "device" not in here
    assert machine.machine_of("reference", "cpu")["device"]["kind"] == "cpu"


def test_cuda_device_has_driver_and_cuda_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA device is recorded with name, driver and CUDA version; a driver that cannot be read is "unknown"."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(machine, "DRIVER_QUERY", ("echo", "570.1"))
    assert machine.device_facts("cuda:1") == {"kind": "cuda", "name": "GPU 1", "driver": "570.1", "cuda": "12.8"}
    monkeypatch.setattr(machine, "DRIVER_QUERY", ("no-such-command",))
    assert machine.device_facts("cuda")["driver"] == "unknown"


def test_record_keeps_instruction_sets_and_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run records the processor's instruction sets and the compilers' variables, with ~ for the home folder."""
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16 avx512f smep\n\nmodel name\t: other\n")
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/home/somebody/bin/ptxas")
    here = machine.machine_of("reference")
    assert here["cpu"] == {"name": "Some CPU", "instructions": "amx_bf16 avx2 avx512f"}
    assert here["environment"]["TRITON_PTXAS_PATH"] == "~/bin/ptxas"


def test_processor_without_a_list_has_a_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The record has the processor's name if the system lists no instruction sets."""
    monkeypatch.setattr(processor, "CPUINFO", tmp_path / "absent")
    assert processor.processor()["name"] and processor.processor()["instructions"] == ""
