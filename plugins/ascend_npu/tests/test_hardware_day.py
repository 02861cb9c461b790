"""Tests of tools/hardware_day.py: its steps, its behaviour after a failed step, and the file that it writes."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))


def test_later_steps_run_after_a_failure(tmp_path):
    """After a failed step its log is kept, and its follow-up steps run. Hardware steps are skipped on the emulator."""
    from hardware_day import Step, run_all

    good, bad = [sys.executable, "-c", "print('fine')"], [sys.executable, "-c", "raise SystemExit('broken')"]
    follow_up = Step("why", [sys.executable, "-c", "import os; print(os.environ['SWITCH'])"], {"SWITCH": "on"})
    todo = [
        Step("bad", bad, on_failure=[follow_up]),
        Step("good", good, on_failure=[follow_up]),
        Step("clock", good, hardware=True),
    ]
    rows = run_all(todo, tmp_path, emulated=True, say=lambda line: None)
    assert [(row["step"], row["exit_code"]) for row in rows] == [("bad", 1), ("why", 0), ("good", 0), ("clock", None)]
    assert "broken" in (tmp_path / "bad.log").read_text() and "on" in (tmp_path / "why.log").read_text()


def test_hardware_day_covers_every_step(tmp_path):
    """The steps begin with `draftmark doctor`, end with the benchmark, and decode with every kind of drafts."""
    from hardware_day import steps

    names = [step.name for step in steps(tmp_path, rehearse=False)]
    assert names[0] == "doctor" and names[-1] == "benchmark" and {"operators", "contract", "tests"} <= set(names)
    assert {f"smollm2-{one}{graph}" for one in ("plain", "ngram", "eagle") for graph in ("", "-graph")} <= set(names)


@pytest.mark.device
def test_a_rehearsal_writes_a_bundle(emulated, tmp_path):
    """A rehearsal of `draftmark doctor` succeeds on the emulator, and its result file is marked as emulated."""
    command = [sys.executable, str(TOOLS / "hardware_day.py"), "--rehearse", "--out", str(tmp_path / "day")]
    done = subprocess.run([*command, "--steps", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    with tarfile.open(tmp_path / "day.tar.gz") as archive:
        held = archive.extractfile("day/summary.json")
        assert {"day/doctor.log", "day/summary.json"} <= set(archive.getnames()) and held is not None
        summary = json.loads(held.read())
    assert summary["device"] == "emulated, not hardware" and summary["machine"]["hardware"] is False
    real = subprocess.run(command[:2], capture_output=True, text=True)
    assert real.returncode != 0 and "the hardware day needs hardware" in real.stderr
