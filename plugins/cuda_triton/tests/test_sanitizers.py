"""The compute-sanitizer command reports passed shapes and timeouts, and counts the tool's reports by kind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugins.cuda_triton.tools import sanitizers
from plugins.cuda_triton.tools.sanitizers import reports, without_reports

DEVICE = sanitizers.TESTS[0]
RACE = """
========= COMPUTE-SANITIZER
============================= test session starts ==============================
test_device.py::test_random[a] ========= Error: Race reported between Read access at attend_prefill+0x110 in start.py:60
=========     and Write access at attend_prefill+0x1040 in warp_specialize.py:31 [508 hazards]
=========     and Write access at attend_prefill+0x1050 in warp_specialize.py:31 [2 hazards]
=========     and Write access at attend_prefill+0xc950 in prefill.py:334 [38 hazards]
========= 
PASSED [ 50%]
test_device.py::test_random[b] ========= Error: Race reported between Read access at attend_prefill+0x140 in start.py:60
=========     and Write access at attend_prefill+0x2040 in warp_specialize.py:31 [1 hazard]
=========     and Write access at attend_prefill+0xd950 in prefill.py:334 [3 hazards]
=========
PASSED [100%]

============================== 2 passed in 34.32s ==============================
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at combine_splits+0x160
=========     by thread (0,0,0) in block (7,0,0)
========= \ntest_device.py::test_random_batches[b] PASSED
========= ERROR SUMMARY: 1 error
"""
FAKE_TOOL = """#!{python}
import os, sys, time
tool, shapes = sys.argv[2], [one for one in sys.argv if "::" in one]
print("========= COMPUTE-SANITIZER")
print(os.getpid(), "runs", flush=True)
for shape in shapes:
    print(shape, os.environ["ENDS"], flush=True)
    if os.environ["ENDS"] == "HANGS" or shape.endswith("hangs]"):
        time.sleep(600)
if tool == "memcheck":
    print("========= Invalid __global__ read of size", os.environ["DRAFTMARK_BATCHES"], "bytes")
print("========= ERROR SUMMARY")
sys.exit(int(os.environ.get("CODE", 0)))
"""


def test_reports_are_counted_by_kind() -> None:
    """Reports are counted by kind and source line; other lines of the tool and lines of pytest do not count."""
    read = "Error: Race reported between Read access at attend_prefill in start.py:60"
    written = [
        f"and Write access at attend_prefill in {where}" for where in ("warp_specialize.py:31", "prefill.py:334")
    ]
    assert reports(RACE) == Counter({" | ".join((read, *written)): 2})
    assert reports(INVALID) == Counter({"Invalid __global__ read of size 4 bytes | at combine_splits": 1})
    assert not reports("========= COMPUTE-SANITIZER\n1 passed\n========= ERROR SUMMARY: 0 errors\n")


def test_test_outcome_is_parsed_after_a_report() -> None:
    """A test's outcome is read although a report begins on the test's own line."""
    output = without_reports(RACE)
    assert all(f"test_random[{one}] PASSED" in output for one in "ab") and "Race" not in output
    assert "2 passed" in output and "[b] PASSED" in without_reports(INVALID)


@pytest.fixture
def fake_tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fake compute-sanitizer on the PATH."""
    path = tmp_path / "compute-sanitizer"
    path.write_text(FAKE_TOOL.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.fixture
def run(fake_tool: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Function that runs the command over shapes with the fake tool, and returns its exit code and its JSON."""

    def ran(ends: str, *options: str, shapes: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setenv("ENDS", ends)
        monkeypatch.setattr(sanitizers, "_shapes", lambda: [f"{DEVICE}[{shape}]" for shape in shapes.split()])
        monkeypatch.setattr(sys, "argv", ["sanitizers", str(tmp_path / "out"), *options])
        return sanitizers.main(), json.loads((tmp_path / "out" / "sanitizers.json").read_text())

    return ran


def test_every_shape_runs_once(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    """Each shape runs once over several processes, and a report or a failed shape gives exit code 1."""
    code, found = run("PASSED", "--workers", "2", "--batches", "5", shapes="a b c d e")
    named = [f"{DEVICE}[{shape}]" for shape in "abcde"]
    assert code == 1 and found["memcheck"]["passed"] == found["racecheck"]["passed"] == named
    assert found["memcheck"]["reports"] == {"Invalid __global__ read of size 5 bytes": 2}
    assert run("PASSED", "--tools", "racecheck", "--every", "2", shapes="a b c")[0] == 0
    code, found = run("FAILED", "--tools", "racecheck", shapes="a b")
    assert code == 1 and found["racecheck"]["failed"] == named[:2] and not found["racecheck"]["not_ended"]


def test_unknown_report_text_is_counted(
    run: Callable[..., tuple[int, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tool's exit code counts as a report, even if no report line is recognized."""
    monkeypatch.setenv("CODE", str(sanitizers.REPORTED))
    code, found = run("PASSED", "--tools", "racecheck", shapes="a")
    assert code == 1 and not found["racecheck"]["reports"] and found["racecheck"]["exit_codes"] == [sanitizers.REPORTED]


def test_timeouts_are_named(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    """A shape that does not end within the time limit, here 0 seconds, is listed and does not count as passed."""
    code, found = run("PASSED", "--tools", "racecheck", "--workers", "1", "--seconds", "0", shapes="hangs b")
    assert code == 1 and found["racecheck"]["exit_codes"] == [-9]
    assert f"{DEVICE}[b]" in found["racecheck"]["not_ended"]


@pytest.mark.long
def test_processes_end_with_the_command(fake_tool: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Test processes end with the command, although they have their own sessions."""
    monkeypatch.setenv("ENDS", "HANGS")
    command = [sys.executable, "-m", "plugins.cuda_triton.tools.sanitizers", str(tmp_path), "--tools", "racecheck"]
    log, begun = tmp_path / "racecheck-0.log", []
    with subprocess.Popen([*command, "--workers", "1"], cwd=sanitizers.ROOT) as process:
        while process.poll() is None and not begun:
            time.sleep(0.05)
            begun = re.findall(r"(\d+) runs", log.read_text() if log.exists() else "")
        process.terminate()
    assert process.returncode == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun[0]), 0)


@pytest.mark.long
def test_shapes_match_the_device_tests() -> None:
    """The command runs each parametrized case of the two random-batch device tests once."""
    from . import test_decode_verify_device, test_prefill_fp8

    found = sanitizers._shapes()
    assert len(set(found)) == len(found) == len(test_decode_verify_device.SHAPES) + len(test_prefill_fp8.RANDOM)


def test_missing_tool_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """A missing compute-sanitizer is reported before anything runs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sanitizers", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        sanitizers.main()
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err
