"""Fixtures and skips. Device tests run on an NPU, or on the emulator if LD_LIBRARY_PATH has it; others on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # lets test modules import ascend_shapes
HAS_NPU = EMULATED = False
if importlib.util.find_spec("torch_npu") is not None:
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from draftmark_ascend_npu.device import machine, stamp

    HAS_NPU, EMULATED = machine().product is not None, machine().emulated


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip device tests without torch_npu and a runtime, and tests of the emulator on hardware."""
    for item in items:
        if item.get_closest_marker("device") and not HAS_NPU and "ascend_npu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="needs torch_npu and a runtime: make npu"))
        elif "emulated" in getattr(item, "fixturenames", ()) and HAS_NPU and not EMULATED:
            item.add_marker(pytest.mark.skip(reason="tests the emulator, and this is hardware"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print which device the NPU tests ran on."""
    if HAS_NPU:
        terminalreporter.write_line(f"device of the NPU tests: {stamp()}")


@pytest.fixture(autouse=True)
def on_npu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Import torch_npu for a device test; on the emulator check that no allocation was written past its end."""
    if request.node.get_closest_marker("device") is None:
        yield
        return
    import torch_npu  # noqa: F401

    yield
    if EMULATED:
        from emulator_log import broken_fence

        assert broken_fence() == ""


@pytest.fixture
def emulated() -> None:
    """Mark a test as a test of the emulator, which is skipped on hardware. This fixture does nothing else."""


@pytest.fixture
def subject():
    """Return the plugin, on the NPU, as the backend under test for the contract's checks."""
    from draftmark.registry import load
    from draftmark_contract.backend_under_test import BackendUnderTest
    from draftmark_contract.check import Tier

    return BackendUnderTest(load("ascend_npu"), "npu", Tier.DEVICE)


@pytest.fixture
def run_in_new_process() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a program in a new process. After an asynchronous error torch_npu drops work."""

    def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"PYTHONPATH": str(Path(__file__).parent), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-W", "ignore", "-c", program]
        env = {**os.environ, **own, **environment}
        return subprocess.run(command, env=env, capture_output=True, text=True)

    return run
