"""The day with GPUs: who waits for whom, what a job sees, and that nobody is kept from running by another."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import day
from benchmarks.day import ROOT, Day, Job, Running, jobs

SHOW = "import os, sys; print(os.environ.get('CUDA_VISIBLE_DEVICES'), sys.argv[1])"


def _module(folder: Path, name: str, text: str) -> None:
    (folder / f"{name}.py").write_text(text)


def _day(
    tmp_path: Path, todo: list[Job], gpus: int = 2, seconds: float = 600, **at: str
) -> dict[str, dict[str, object]]:
    found = Day(todo, gpus, seconds, at, tmp_path)
    found.run()
    assert json.loads((tmp_path / "day.json").read_text()) == found.how
    return found.how


def test_jobs_have_gpus_of_their_own(tmp_path: Path) -> None:
    """One GPU, both, or none; and a second command sees what the first sees."""
    _module(tmp_path, "show", SHOW)
    todo = [
        Job("one", ("show", "a"), 60, engine="e", beside=("show", "b")),
        Job("none", ("show", "c"), 60, 0, "e"),
        Job("both", ("show", "d"), 60, 2, "e"),
        Job("three", ("show", "e"), 60, 3, "e"),
    ]
    how = _day(tmp_path, todo, e=str(tmp_path))
    assert {name: one["ended"] for name, one in how.items()} == {
        "one": "passed", "none": "passed", "both": "passed", "three": "not run: needs 3 GPUs",
    }  # fmt: skip
    said = {path.stem: path.read_text().split() for path in tmp_path.glob("*.log")}
    assert said["one"] == ["0", "a"] and said["one-beside"] == ["0", "b"] and said["both"] == ["0,1", "d"]
    assert said["none"] == [os.environ.get("CUDA_VISIBLE_DEVICES", "None"), "c"]


def test_who_fails_or_hangs_keeps_nobody_from_running(tmp_path: Path) -> None:
    """But those who would read what it should have written."""
    _module(tmp_path, "fails", "raise SystemExit(3)")
    _module(tmp_path, "hangs", "import time; time.sleep(3600)")
    _module(tmp_path, "show", SHOW)
    todo = [
        Job("failed", ("fails",), 60, engine="e"),
        Job("hung", ("hangs",), 0.2, engine="e"),
        Job("reads", ("show", "a"), 60, 0, "e", after="failed"),
        Job("reads-on", ("show", "b"), 60, 0, "e", after="hung"),
    ]
    how = _day(tmp_path, todo, gpus=1, e=str(tmp_path))
    assert {name: one["ended"] for name, one in how.items()} == {
        "failed": "failed (3)", "hung": "out of time", "reads": "not run: failed did not run", "reads-on": "passed",
    }  # fmt: skip


@pytest.mark.parametrize("answer", ["sys.exit((out / 'told').write_text('') or 0)", "None"], ids=["listens", "deaf"])
def test_a_job_may_end_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """It is told first, and killed where that does not end it."""
    monkeypatch.setattr(day, "GRACE", 60.0 if "told" in answer else 0.0)
    lines = f"""
    import pathlib, signal, sys, time
    out = pathlib.Path(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda *_: {answer})
    (out / "ready").write_text("")
    while True:  # a signal right before a sleep does not wake it
        time.sleep(0.05)
    """
    _module(tmp_path, "job", textwrap.dedent(lines))
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    running = Running(Job("it", ("job", str(tmp_path)), 600), sys.executable, [], environment, tmp_path, 600.0)
    while not (tmp_path / "ready").exists():
        assert running.ended() is None
    running.end()
    assert (tmp_path / "told").exists() == ("told" in answer)


def test_jobs_of_one_engine_run_one_after_another(tmp_path: Path) -> None:
    """Though there are GPUs for both; what another engine or none is needed for runs beside them."""
    day = Day([], 3, 600, {}, tmp_path)
    day._running = [cast(Running, SimpleNamespace(job=Job(name, (), 60, engine=name))) for name in ("vllm", "")]
    waits = {engine: day._waits(Job("next", (), 60, engine=engine)) for engine in ("vllm", "sglang", "")}
    assert waits == {"vllm": True, "sglang": False, "": False}


def test_without_time_nothing_begins(tmp_path: Path) -> None:
    """And each says so."""
    how = _day(tmp_path, [Job("late", ("show", "a"), 60)], seconds=0)
    assert how["late"] == {"ended": "not run: no time left"}


def test_every_job_is_a_program_of_this_repository(tmp_path: Path) -> None:
    """Its module is there, its name is its own, and files that it reads are."""
    todo = jobs(tmp_path, 2)
    assert len({job.name for job in todo}) == len(todo)
    assert all(not job.after or job.after in {one.name for one in todo} for job in todo)
    for job in todo:
        for command in filter(None, (job.command, job.beside)):
            assert importlib.util.find_spec(command[0]) is not None, command
            assert all(Path(word).exists() for word in command if word.startswith(str(ROOT)) and word.endswith(".json"))


@pytest.mark.parametrize("asked", [["--only", "verdicts"], ["--seconds", "soon"]])
def test_a_wrong_command_says_what_there_is(tmp_path: Path, asked: list[str]) -> None:
    """Before anything runs."""
    command = [sys.executable, "-m", "benchmarks.day", str(tmp_path), *asked]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and ("contract-cuda_triton" in done.stderr or "invalid float" in done.stderr)
