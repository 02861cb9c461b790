"""The command for somebody with a device: what it runs, what it does when a step fails, what it sends back."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"
sys.path.insert(0, str(TOOLS))


def test_a_failing_step_keeps_nobody_from_running(tmp_path):
    """Its log is kept; steps that say why follow it at once; what means nothing on the emulator is left out."""
    from hardware_day import Step, run_all

    good, bad = [sys.executable, "-c", "print('fine')"], [sys.executable, "-c", "raise SystemExit('broken')"]
    why = Step("why", [sys.executable, "-c", "import os; print(os.environ['SWITCH'])"], {"SWITCH": "on"})
    todo = [
        Step("bad", bad, on_failure=[why]),
        Step("good", good, on_failure=[why]),
        Step("clock", good, hardware=True),
    ]
    rows = run_all(todo, tmp_path, emulated=True, say=lambda line: None)
    assert [(row["step"], row["exit_code"]) for row in rows] == [("bad", 1), ("why", 0), ("good", 0), ("clock", None)]
    assert "broken" in (tmp_path / "bad.log").read_text() and "on" in (tmp_path / "why.log").read_text()


def test_the_day_covers_install_to_benchmark(tmp_path):
    """Doctor first, the real model in every way of drafting, contract, tests and benchmark."""
    from hardware_day import steps

    names = [step.name for step in steps(tmp_path, rehearse=False)]
    assert names[0] == "doctor" and names[-1] == "benchmark" and {"operators", "contract", "tests"} <= set(names)
    assert {f"smollm2-{one}{graph}" for one in ("plain", "ngram", "eagle") for graph in ("", "-graph")} <= set(names)


@pytest.mark.device
def test_a_rehearsal_writes_a_bundle(emulated, tmp_path):
    """Doctor finds the emulated device ready; the summary says that it is none."""
    command = [sys.executable, str(TOOLS / "hardware_day.py"), "--rehearse", "--out", str(tmp_path / "day")]
    done = subprocess.run([*command, "--steps", "doctor"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    with tarfile.open(tmp_path / "day.tar.gz") as archive:
        held = archive.extractfile("day/summary.json")
        assert {"day/doctor.log", "day/summary.json"} <= set(archive.getnames()) and held is not None
        summary = json.loads(held.read())
    assert summary["device"] == "emulated, not hardware" and summary["machine"]["hardware"] is False
    alone = subprocess.run(command[:2], capture_output=True, text=True)
    assert alone.returncode != 0 and "the hardware day means nothing here" in alone.stderr
