"""What is said of compute-sanitizer's runs: who passed, who did not end, and each kind of report once."""

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
test_device.py::test_random[a] ========= Error: Race reported between Read access at attend_uniform+0x110 in start.py:60
=========     and Write access at attend_uniform+0x1040 in roles.py:31 [508 hazards]
=========     and Write access at attend_uniform+0x1050 in roles.py:31 [2 hazards]
=========     and Write access at attend_uniform+0xc950 in uniform.py:334 [38 hazards]
========= 
PASSED [ 50%]
test_device.py::test_random[b] ========= Error: Race reported between Read access at attend_uniform+0x140 in start.py:60
=========     and Write access at attend_uniform+0x2040 in roles.py:31 [1 hazard]
=========     and Write access at attend_uniform+0xd950 in uniform.py:334 [3 hazards]
=========
PASSED [100%]

============================== 2 passed in 34.32s ==============================
========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)
"""
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at merge_pieces+0x160
=========     by thread (0,0,0) in block (7,0,0)
========= \ntest_device.py::test_random_batches[b] PASSED
========= ERROR SUMMARY: 1 error
"""
STAND_IN = """#!{python}
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
    """By lines of source; what is a tool's own, and what pytest prints, its rules too, are none."""
    read = "Error: Race reported between Read access at attend_uniform in start.py:60"
    written = [f"and Write access at attend_uniform in {where}" for where in ("roles.py:31", "uniform.py:334")]
    assert reports(RACE) == Counter({" | ".join((read, *written)): 2})
    assert reports(INVALID) == Counter({"Invalid __global__ read of size 4 bytes | at merge_pieces": 1})
    assert not reports("========= COMPUTE-SANITIZER\n1 passed\n========= ERROR SUMMARY: 0 errors\n")


def test_test_outcome_is_parsed_after_a_report() -> None:
    """Which begins on the test's own line."""
    said = without_reports(RACE)
    assert all(f"test_random[{one}] PASSED" in said for one in "ab") and "Race" not in said
    assert "2 passed" in said and "[b] PASSED" in without_reports(INVALID)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A program that is found as compute-sanitizer."""
    path = tmp_path / "compute-sanitizer"
    path.write_text(STAND_IN.format(python=sys.executable))
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)


@pytest.fixture
def run(stand_in: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Runs the tool over shapes with that; returns its exit code and what it wrote."""

    def ran(ends: str, *asked: str, shapes: str) -> tuple[int, dict[str, Any]]:
        monkeypatch.setenv("ENDS", ends)
        monkeypatch.setattr(sanitizers, "_shapes", lambda: [f"{DEVICE}[{shape}]" for shape in shapes.split()])
        monkeypatch.setattr(sys, "argv", ["sanitizers", str(tmp_path / "out"), *asked])
        return sanitizers.main(), json.loads((tmp_path / "out" / "sanitizers.json").read_text())

    return ran


def test_every_shape_runs_once(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    """By several processes; and nothing is clean where something was reported, or did not pass."""
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
    """The tool says by its exit code that it reported something, whatever its lines look like."""
    monkeypatch.setenv("CODE", str(sanitizers.REPORTED))
    code, found = run("PASSED", "--tools", "racecheck", shapes="a")
    assert code == 1 and not found["racecheck"]["reports"] and found["racecheck"]["exit_codes"] == [sanitizers.REPORTED]


def test_timeouts_are_named(run: Callable[..., tuple[int, dict[str, Any]]]) -> None:
    """And counts as not passed. Its process has all the time that it may have, which is none."""
    code, found = run("PASSED", "--tools", "racecheck", "--workers", "1", "--seconds", "0", shapes="hangs b")
    assert code == 1 and found["racecheck"]["exit_codes"] == [-9]
    assert f"{DEVICE}[b]" in found["racecheck"]["not_ended"]


def test_processes_end_with_the_command(stand_in: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They have sessions of their own: nobody else would end them."""
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


def test_shapes_match_the_device_tests() -> None:
    """Each by a name that pytest takes."""
    from . import test_decode_verify_device, test_prefill_fp8

    found = sanitizers._shapes()
    assert len(set(found)) == len(found) == len(test_decode_verify_device.SHAPES) + len(test_prefill_fp8.RANDOM)


def test_missing_tool_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """Before anything runs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["sanitizers", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        sanitizers.main()
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err
