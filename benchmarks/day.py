"""All GPU jobs of draftmark in one command: contract verdicts, kernel times, vLLM and SGLang.

    python -m benchmarks.day OUT [--gpus N] [--seconds N] [--only NAME …] [--at ENGINE=PATH …]

Each job runs in its own process on its own GPUs, the most informative jobs first. A job that fails or times out does
not stop the others. Most jobs continue from their last result when the command runs again with the same OUT. `--at`
names an interpreter or a folder of packages for an engine that is not installed here. OUT receives each job's files and
log, and `day.json` with its result, seconds and GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from draftmark_contract.runner.staleness import standing

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BACKENDS = ("cuda_triton", "reference", "cuda_trtllm", "cuda_flashinfer")
POLL = 0.1
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL, so that a job can end processes that it started in other sessions."""


@dataclass(frozen=True)
class Job:
    """One command to run.

    Attributes:
        name: name of the job and of its log.
        command: a module and its arguments.
        seconds: time limit.
        gpus: number of GPUs that the job uses exclusively.
        engine: engine that the job imports: vllm, sglang or "". Only one job per engine runs at a time.
        after: name of a job that must have run before.
        companion: a second command that runs at the same time on the same GPUs.
        record: file name of the job's verdict. The job is left out if that record is valid for today's code.
    """

    name: str
    command: tuple[str, ...]
    seconds: float
    gpus: int = 1
    engine: str = ""
    after: str = ""
    companion: tuple[str, ...] = ()
    record: str = ""


def jobs(out: Path, workers: int) -> list[Job]:
    """Return all jobs, the most informative first. Jobs for two GPUs come last, so that no GPU waits for the other."""
    attention = ("benchmarks.attention", "--json", str(out / "attention-h200.json"))
    texts, on_ranks = str(out / "sglang-texts.json"), str(out / "sglang-ranks.json")
    return [
        *(_verdict(out, backend, workers) for backend in BACKENDS),
        _vllm(out, "h200-plan"),
        Job(
            "sglang",
            ("benchmarks.sglang", str(out / "sglang-h200.json"), "--after", texts, "--all", "780", "--each", "60"),
            800,
            engine="sglang",
            companion=("benchmarks.sglang.texts", texts),
        ),
        Job("attention", (*attention, "--grid", "--seconds", "280"), 320),
        Job("device-tests", ("pytest", "-q", "-m", "device", "plugins/cuda_triton/tests"), 600),
        Job("sanitizers", ("plugins.cuda_triton.tools.sanitizers", str(out / "sanitizers"), "--seconds", "560"), 1200),
        _vllm(out, "h200-texts"),
        *(_vllm(out, f"h200-{what}-plan") for what in ("ngram", "eagle", "mixed", "windows", "qwen", "fp8")),
        Job("sglang-ranks", ("benchmarks.sglang.texts", on_ranks, "--ranks", "2"), 180, 2, "sglang"),
        *(_vllm(out, f"h200-{what}-plan", gpus=2) for what in ("two", "two-eagle")),
        *(_judged(out, plan) for plan in ("h200-texts", "h200-fp8-plan", "h200-two-plan")),
    ]


def _vllm(out: Path, plan: str, gpus: int = 1) -> Job:
    """Return the job of a plan of `benchmarks.vllm`; it resumes from an existing result."""
    name, result, models = _vllm_files(out, plan)
    resumed = ("--resume", str(result)) if result.exists() else ()
    files = (str(ROOT / "benchmarks" / "vllm" / f"{plan}.json"), "--out", str(result), "--models", str(models))
    return Job(name, ("benchmarks.vllm", *files, *resumed, "--seconds", "560"), 600, gpus, "vllm")


def _judged(out: Path, plan: str) -> Job:
    """Return the job that compares the texts of a plan's result. It needs no GPU."""
    name, result, models = _vllm_files(out, plan)
    return Job(f"{name}-judged", ("benchmarks.vllm.judged", str(result), str(models)), 120, 0, "vllm", after=name)


def _vllm_files(out: Path, plan: str) -> tuple[str, Path, Path]:
    """Return a plan's job name, as in vllm-windows, its result file, and the folder of all plans' models."""
    name = "-".join(["vllm", *(word for word in plan.split("-") if word not in ("h200", "plan"))])
    return name, out / f"{name}-h200.json", out / "models"


def _verdict(out: Path, backend: str, workers: int) -> Job:
    """Return the job of a backend's contract, all tiers. A journal in OUT can hold results of the first two tiers."""
    files = {"--journal": f"contract-{backend}.jsonl", "--json": f"contract-{backend}-items.json"}
    files["--record"] = f"contract-{backend}-h200.json"
    named = [word for option, file in files.items() for word in (option, str(out / file))]
    command = ("draftmark_tools.cli", "contract", backend, "--tier", "device", "--workers", str(workers), *named)
    return Job(f"contract-{backend}", command, 420, record=files["--record"])


class Running:
    """Holds the processes of a running job, and ends them.

    Args:
        given: numbers of the GPUs.
        environment: environment of the processes, without CUDA_VISIBLE_DEVICES.
    """

    def __init__(
        self, job: Job, python: str, given: list[int], environment: dict[str, str], out: Path, left: float
    ) -> None:
        self.job, self.given, self.began = job, given, time.monotonic()
        self._until = self.began + min(job.seconds, left)
        shown = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, given))} if given else {}
        self._processes = []
        for suffix, command in (("", job.command), ("-companion", job.companion)):
            if not command:
                continue
            call = [python, "-m", *command]
            with (out / f"{job.name}{suffix}.log").open("ab") as log:
                self._processes.append(
                    subprocess.Popen(
                        call, cwd=ROOT, env=environment | shown, stdout=log, stderr=log, start_new_session=True
                    )
                )

    def ended(self) -> str | None:
        """Return the job's result, or None while it runs."""
        codes = [process.poll() for process in self._processes]
        if None in codes and time.monotonic() < self._until:
            return None
        self.end()
        if None in codes:
            return "out of time"
        return "passed" if not any(codes) else f"failed ({', '.join(map(str, codes))})"

    def end(self) -> None:
        """End all processes of the job and the processes that they started."""
        until = time.monotonic() + GRACE
        for process in self._processes:
            self._signal(process, signal.SIGTERM)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            self._signal(process, signal.SIGKILL)
            process.wait()

    @staticmethod
    def _signal(process: subprocess.Popen[bytes], what: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, what)


class Day:
    """Runs jobs and assigns the machine's GPUs to them.

    Args:
        at: interpreter or folder of each engine, by name.
    """

    def __init__(self, todo: list[Job], gpus: int, seconds: float, at: dict[str, str], out: Path) -> None:
        self._todo, self._gpus, self._free = list(todo), gpus, list(range(gpus))
        self._until, self._at, self._out = time.monotonic() + seconds, at, out
        self._running: list[Running] = []
        self.results: dict[str, dict[str, object]] = {}

    def run(self) -> None:
        """Run until every job has ended or the time is over."""
        try:
            while self._todo or self._running:
                self._begin()
                time.sleep(POLL)
                for one in list(self._running):
                    how = one.ended()
                    if how is not None:
                        self._running.remove(one)
                        self._free = sorted(self._free + one.given)
                        self._note(one.job, how, seconds=round(time.monotonic() - one.began, 1), gpus=one.given)
        finally:
            for one in self._running:
                one.end()

    def _begin(self) -> None:
        """Start every job that can run. A job that waits for a second GPU also delays the jobs after it."""
        for job in list(self._todo):
            left, why = self._until - time.monotonic(), ""
            if job.gpus > self._gpus:
                why = f"needs {job.gpus} GPUs"
            elif left <= 0:
                why = "no time left"
            elif job.after and self.results.get(job.after, {}).get("ended") not in (None, "passed", "out of time"):
                why = f"{job.after} did not run"
            if why:
                self._todo.remove(job)
                self._note(job, f"not run: {why}")
            elif self._waits(job):
                continue
            elif len(self._free) < job.gpus:
                return
            else:
                self._todo.remove(job)
                given, self._free = self._free[: job.gpus], self._free[job.gpus :]
                python, environment = self._where(job.engine)
                self._running.append(Running(job, python, given, environment, self._out, left))

    def _waits(self, job: Job) -> bool:
        """Return True if the job must wait: for the job `after`, or for a running job that uses the same engine."""
        engines = {one.job.engine for one in self._running} - {""}
        return job.engine in engines or (bool(job.after) and job.after not in self.results)

    def _where(self, engine: str) -> tuple[str, dict[str, str]]:
        """Return the job's interpreter and environment. An engine's own packages come before those of this process."""
        path = self._at.get(engine, "")
        if path and not Path(path).is_dir():
            return path, dict(os.environ)
        folders = [one for one in (path, os.environ.get("PYTHONPATH", "")) if one]
        return sys.executable, os.environ | ({"PYTHONPATH": os.pathsep.join(folders)} if folders else {})

    def _note(self, job: Job, how: str, **more: object) -> None:
        self.results[job.name] = {"ended": how, **more}
        print(f"{job.name}: {how} {more or ''}", flush=True)
        (self._out / "day.json").write_text(json.dumps(self.results, indent=1) + "\n")


def main() -> None:
    """Run the selected jobs; exit with 0 only if all of them ran and passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=4 * 3600, help="time for all jobs; running ones are ended")
    parser.add_argument("--only", nargs="*", default=(), metavar="NAME", help="run only these jobs, in the usual order")
    parser.add_argument(
        "--at", action="append", default=[], metavar="ENGINE=PATH", help="interpreter or package folder of an engine"
    )
    parser.add_argument("--workers", type=int, default=min(20, os.cpu_count() or 1), help="processes of a contract run")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    todo = jobs(out, args.workers)
    unknown = set(args.only) - {job.name for job in todo}
    if unknown:
        parser.error(f"no job is named {', '.join(sorted(unknown))}; there are {', '.join(job.name for job in todo)}")
    if args.only:
        todo = [job for job in todo if job.name in args.only]
    else:
        todo = [job for job in todo if not job.record or standing(RESULTS / job.record)]
    day = Day(todo, args.gpus, args.seconds, dict(one.split("=", 1) for one in args.at), out)
    day.run()
    sys.exit(0 if all(one["ended"] == "passed" for one in day.results.values()) else 1)


if __name__ == "__main__":
    main()
