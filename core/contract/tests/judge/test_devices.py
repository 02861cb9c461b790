"""Tests of the devices that backends are judged on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from draftmark.errors import DraftmarkError
from draftmark_contract.judge.devices import BUILT_IN, Cuda, Device, device_of


class _Graph:
    """Graph of a device that is not here: it counts replays."""

    replays = 0

    def replay(self) -> None:
        """Count one replay."""
        self.replays += 1


class _Stream:
    """Stream, and its context manager."""

    def wait_stream(self, other: Any) -> None:
        """Accept any stream."""

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def _module() -> ModuleType:
    """Return torch's module of a device type with graphs."""
    made: Any = ModuleType("torch.mydev")
    made.is_available = lambda: True
    made.get_device_name = lambda device: f"My Device {device}"
    made.synchronized = []
    made.synchronize = lambda: made.synchronized.append(True)
    made.CUDAGraph, made.Stream, made.current_stream = _Graph, _Stream, _Stream
    made.stream = made.graph = lambda one: _Stream()
    return made  # type: ignore[no-any-return]


def test_captures_record_through_torchs_module_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is recorded and replayed by the classes in torch's module of the device type, whatever its name."""
    module: Any = _module()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    device = Cuda("mydev:1")
    device.open()
    ran: list[int] = []
    device.warm_up(lambda: ran.append(1))
    graph, out = device.record(lambda: [*ran, 2])
    graph.replay()
    device.synchronize()
    assert ran == [1] and out == [1, 2] and graph.replays == 1 and module.synchronized == [True]
    assert device.captures and device.name == "My Device mydev:1"


def test_unknown_type_runs_without_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device type without a class is judged without graphs, if torch has it; else the error names it."""
    with pytest.raises(DraftmarkError, match="torch sees no mydev device here"):
        device_of("mydev:0").open()
    monkeypatch.setattr(torch, "get_device_module", lambda kind: _module())
    device = device_of("mydev:0")
    device.open()
    assert type(device) is Device and not device.captures and not device.host


def test_missing_vendor_module_is_named() -> None:
    """If a module that registers the device type with torch is missing, the error names it."""
    if importlib.util.find_spec("torch_npu") is not None:
        pytest.skip("torch_npu is installed")
    with pytest.raises(DraftmarkError, match="device npu:0 needs torch_npu, which cannot be imported"):
        device_of("npu:0").open()


def test_cpu_is_the_only_host() -> None:
    """The CPU is a host without graphs; every other built-in type is not a host."""
    assert device_of("cpu").name == "cpu" and not device_of("cpu").captures
    device_of("cpu").open()
    assert [kind for kind, one in BUILT_IN.items() if one.host] == ["cpu"]


def test_entry_point_adds_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that a distribution registers is used for its device type."""
    info = tmp_path / "my_device-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-device\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[draftmark.judge_devices]\nmydev = my_device:MyDevice\n")
    (tmp_path / "my_device.py").write_text(
        "from draftmark_contract.judge.devices import Device\n\n\nclass MyDevice(Device):\n    graph = 'MyGraph'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert device_of("mydev:3").graph == "MyGraph" and device_of("cuda").graph == "CUDAGraph"
