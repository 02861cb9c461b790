"""Where the tests run: on whatever NPU the library path gives, or, for those that need none, on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for ascend_shapes, which tests parametrise over
HAS_NPU = EMULATED = False
if importlib.util.find_spec("torch_npu") is not None:
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    from draftmark_ascend_npu.device import machine, stamp

    HAS_NPU, EMULATED = machine().product is not None, machine().emulated


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Device tests need torch_npu and a runtime; those about the emulator itself need the emulator."""
    for item in items:
        if item.get_closest_marker("device") and not HAS_NPU and "ascend_npu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="torch_npu or a runtime is not here: make test-npu"))
        elif "emulated" in getattr(item, "fixturenames", ()) and HAS_NPU and not EMULATED:
            item.add_marker(pytest.mark.skip(reason="about the emulator, and this is hardware"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every result says where it was made."""
    if HAS_NPU:
        terminalreporter.write_line(f"device of the NPU tests: {stamp()}")


@pytest.fixture(autouse=True)
def on_npu(request: pytest.FixtureRequest) -> Iterator[None]:
    """torch_npu for device tests; on the emulator no byte around any allocation may have changed afterwards."""
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
    """Asked for by tests that only make sense on the emulator."""


@pytest.fixture
def subject():
    """The plugin on the NPU, as the contract's checks see it."""
    from draftmark.registry import load
    from draftmark_contract.backend_under_test import BackendUnderTest
    from draftmark_contract.check import Tier

    return BackendUnderTest(load("ascend_npu"), "npu", Tier.DEVICE)


@pytest.fixture
def in_process_of_its_own() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a program in a fresh process: after an asynchronous failure torch_npu drops later work without a word."""

    def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
        own = {"PYTHONPATH": str(Path(__file__).parent), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        command = [sys.executable, "-W", "ignore", "-c", program]
        env = {**os.environ, **own, **environment}
        return subprocess.run(command, env=env, capture_output=True, text=True)

    return run
