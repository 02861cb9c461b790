"""Tests of `ContractTests`: each item of a backend is a test of a vendor's own suite."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

TESTS = """
from draftmark_contract.contract_tests import ContractTests

class TestMine(ContractTests):
    subject = "mine"
    tier = "sizing"
    k = "supports.mandatory_profile or load.describes_itself"
"""
FAULTS = """
import os
@hookimpl
def draftmark_supports(geometry):
    if geometry.limits.max_context_len == 1000:
        os._exit(7)
    return ["no trees"] if geometry.draft.topk > 1 else []
"""
Vendor = Callable[..., str]


@pytest.fixture
def vendor(tmp_path: Path, distribution: Callable[..., Path]) -> Vendor:
    """Return a function that runs pytest in the folder of a vendor with the backend "mine", and returns its output."""

    def run(extra: str, code: int, *arguments: str, tests: str = TESTS) -> str:
        folder = tmp_path / "vendor"
        folder.mkdir()
        (folder / "test_mine.py").write_text(tests)
        path = [str(distribution("mine", extra=extra)), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "PYTEST_ADDOPTS": ""}
        command = [sys.executable, "-m", "pytest", "-rsx", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.long
def test_items_are_tests(vendor: Vendor) -> None:
    """A right item passes. Only the item that ends its process fails, with the message and the command of the suite."""
    said = vendor(FAULTS, 1)
    assert "1 failed, " in said and "TestMine.test_contract[supports.mandatory_profile[padded]]" in said
    assert "this item ended the process with code 7" in said
    assert "run it again: draftmark contract mine --item 'supports.mandatory_profile[padded]'" in said
    assert "Traceback" not in said


@pytest.mark.long
def test_backend_that_does_not_load_is_one_sentence(vendor: Vendor) -> None:
    """A backend that does not load ends the session with its reason."""
    said = vendor("raise ValueError('no driver')\n", 2)
    assert "mine has no verdict, because it does not load: " in said and "no driver" in said


@pytest.mark.long
def test_killed_process_ends_the_session(vendor: Vendor) -> None:
    """A process that the system kills ends the session without a failed item."""
    said = vendor(FAULTS.replace("os._exit(7)", "os.kill(os.getpid(), 9)"), 2)
    assert "mine has no verdict, because SIGKILL ended a process of the run" in said and " 1 failed" not in said
