"""Tests of the runner for a day on GPUs: order of jobs, environment of a job, and independence of failed jobs."""

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
    assert json.loads((tmp_path / "day.json").read_text()) == found.results
    return found.results


def test_jobs_have_their_own_gpus(tmp_path: Path) -> None:
    """A job gets no, one or two GPUs; its companion command sees the GPUs of the job's first command."""
    _module(tmp_path, "show", SHOW)
    todo = [
        Job("one", ("show", "a"), 60, engine="e", companion=("show", "b")),
        Job("none", ("show", "c"), 60, 0, "e"),
        Job("both", ("show", "d"), 60, 2, "e"),
        Job("three", ("show", "e"), 60, 3, "e"),
    ]
    how = _day(tmp_path, todo, e=str(tmp_path))
    assert {name: one["ended"] for name, one in how.items()} == {
        "one": "passed", "none": "passed", "both": "passed", "three": "not run: needs 3 GPUs",
    }  # fmt: skip
    printed = {path.stem: path.read_text().split() for path in tmp_path.glob("*.log")}
    assert printed["one"] == ["0", "a"] and printed["one-companion"] == ["0", "b"] and printed["both"] == ["0,1", "d"]
    assert printed["none"] == [os.environ.get("CUDA_VISIBLE_DEVICES", "None"), "c"]


def test_failed_or_hung_job_stops_only_its_readers(tmp_path: Path) -> None:
    """After a failed or hung job the other jobs run, except a job that needs the output of a job that failed."""
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


@pytest.mark.parametrize("answer", ["sys.exit((out / 'told').write_text('') or 0)", "None"], ids=["exits", "ignores"])
def test_job_gets_a_signal_before_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    """At its time limit a job gets SIGTERM, so that it can end its own processes; if it does not exit, it is killed."""
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
    """Jobs of one engine do not overlap, even if GPUs are free; a job of another engine or of none does not wait."""
    day = Day([], 3, 600, {}, tmp_path)
    day._running = [cast(Running, SimpleNamespace(job=Job(name, (), 60, engine=name))) for name in ("vllm", "")]
    waits = {engine: day._waits(Job("next", (), 60, engine=engine)) for engine in ("vllm", "sglang", "")}
    assert waits == {"vllm": True, "sglang": False, "": False}


def test_no_job_starts_without_time(tmp_path: Path) -> None:
    """If no time is left, a job does not start, and is recorded as not run with that reason."""
    how = _day(tmp_path, [Job("late", ("show", "a"), 60)], seconds=0)
    assert how["late"] == {"ended": "not run: no time left"}


def test_every_job_is_a_program_of_this_repository(tmp_path: Path) -> None:
    """Each job has its own name, an existing module and existing input files; the job that it waits for exists."""
    todo = jobs(tmp_path, 2)
    assert len({job.name for job in todo}) == len(todo)
    assert all(not job.after or job.after in {one.name for one in todo} for job in todo)
    for job in todo:
        for command in filter(None, (job.command, job.companion)):
            assert importlib.util.find_spec(command[0]) is not None, command
            assert all(Path(word).exists() for word in command if word.startswith(str(ROOT)) and word.endswith(".json"))


@pytest.mark.parametrize("arguments", [["--only", "verdicts"], ["--seconds", "soon"]])
def test_wrong_arguments_are_reported_before_any_job(tmp_path: Path, arguments: list[str]) -> None:
    """An unknown job name fails with the list of names, and a wrong number fails, before any job runs."""
    command = [sys.executable, "-m", "benchmarks.day", str(tmp_path), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and ("contract-cuda_triton" in done.stderr or "invalid float" in done.stderr)
