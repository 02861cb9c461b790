"""Run a target's items in a child process, and continue in a new one if an item ends that process."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftmark.cli.errors import ArgumentError

from ..runner.fresh import fresh
from .finding import finding
from .item import Item, Outcome, Result
from .target import Engine
from .verdict import Verdict, rules_left_out
from .worker import BEGUN, ENDED, FAILED, OPENED, RunRequest

Say = Callable[[str], None]
TAIL = 12
"""Number of output lines shown for a process that ended before the target was open."""
NEWS_S = 15.0
"""Seconds between two progress lines."""


@dataclass(frozen=True)
class RunLog:
    """Contents of the journal that the worker processes write.

    Attributes:
        about: the target's facts and items, or {} until the target is open.
        failed: reason why the target could not be opened, or "".
        results: finished items by id.
        begun: id of the item that started last, or "".
    """

    about: dict[str, Any]
    failed: str
    results: dict[str, Result]
    begun: str

    @classmethod
    def read(cls, journal: Path) -> RunLog:
        """Read a journal; lines that a crash cut short are skipped."""
        about: dict[str, Any] = {}
        failed, begun, results = "", "", {}
        for line in journal.read_text(encoding="utf-8").splitlines() if journal.exists() else ():
            try:
                [(kind, value)] = json.loads(line).items()
            except ValueError:
                continue
            if kind == OPENED:
                about = value
            elif kind == FAILED:
                failed = value
            elif kind == BEGUN:
                begun = value
            elif kind == ENDED:
                results[value["item"]] = Result.from_json(value)
        return cls(about, failed, results, begun)


def judge(
    engine: Engine,
    target: str,
    device: str,
    items: Sequence[str] = (),
    k: str = "",
    sample: int = 0,
    say: Say = lambda line: None,
) -> Verdict:
    """Judge one backend.

    Args:
        engine: engine that the backend belongs to.
        target: name of the backend.
        device: torch device.
        items: ids of the only items to run; () for all.
        k: run only items with this text in their id.
        sample: maximum number of items per rule; 0 for all.
        say: called every `NEWS_S` seconds with a progress line.

    Raises:
        ArgumentError: the target has no such item, or no id contains `k`.
    """
    named = f"{engine.name}:{target}"
    with tempfile.TemporaryDirectory() as folder:
        command = _command(named, device, getattr(engine, "release", ""))
        request = RunRequest(engine.name, target, device, command, f"{folder}/journal", tuple(items), k, sample)
        run = _Run(engine, request, say)
        try:
            run.all()
        except KeyboardInterrupt:  # finished items are kept; the verdict counts the others as not run
            say("interrupted")
        about = run.log.about
        if not about:
            return Verdict(named, error=run.error())
        known = [one["id"] for one in about["items"]]
        chosen = _chosen(known, request)
        left = rules_left_out([one["rule"] for one in about["items"]], about["left_out"])
        results = [run.log.results[one] for one in chosen if one in run.log.results]
        return Verdict(named, about["facts"], len(known), results, left, len(chosen) < len(known))


def listed(engine: Engine, target: str, device: str) -> tuple[list[dict[str, str]], str]:
    """Return a target's items without running any, and "" or the reason why the target could not be opened."""
    with tempfile.TemporaryDirectory() as folder:
        request = RunRequest(engine.name, target, device, "", f"{folder}/journal", list_only=True)
        run = _Run(engine, request, lambda line: None)
        run.work(request)
        return run.log.about.get("items", []), "" if run.log.about else run.error()


class _Run:
    """Worker processes, one after another, that share one journal."""

    def __init__(self, engine: Engine, request: RunRequest, say: Say) -> None:
        self.request, self._say = request, say
        self._journal = Path(request.journal)
        self._output = self._journal.with_name("log")
        self._environment = fresh(engine.environment(request.target, request.device))
        self.log = RunLog({}, "", {}, "")

    def all(self) -> None:
        """Run all items; an item that ends its process is wrong, and a new process runs the rest."""
        while True:
            before = len(self.log.results)
            code = self.work(replace(self.request, skip=tuple(self.log.results)))
            begun = self.log.begun
            if begun and begun not in self.log.results:
                self._append(self._died(begun, code))
            elif code == 0 or not self.log.about or len(self.log.results) == before:
                return  # finished, or the process ended outside an item: the verdict counts what did not run

    def _died(self, begun: str, code: int) -> Result:
        one = next(one for one in self.log.about["items"] if one["id"] == begun)
        item = Item(one["rule"], one["case"], lambda: None, one["asks"])
        said = f"this item ended the process with code {code} (a crash, os._exit or a hang)\n{self._tail()}"
        return Result(begun, Outcome.WRONG, finding(said, item, self.request.command))

    def work(self, request: RunRequest) -> int:
        """Run one process to its end and return its exit code."""
        path = self._journal.with_name("request")
        path.write_text(request.as_json(), encoding="utf-8")
        with self._output.open("ab") as log:
            command = [sys.executable, "-m", "draftmark_contract.judge.worker", str(path)]
            with subprocess.Popen(command, env=self._environment, stdout=log, stderr=log) as process:
                try:
                    return self._watch(process)
                finally:
                    process.kill()
                    self.log = RunLog.read(self._journal)

    def error(self) -> str:
        """Return the reason why the target is not open."""
        return self.log.failed or f"its process ended before it was open:\n{self._tail()}"

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        reported = time.monotonic()
        while True:
            try:
                return process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                if time.monotonic() - reported > NEWS_S:
                    reported, log = time.monotonic(), RunLog.read(self._journal)
                    self._say(f"{len(log.results)} items finished, running {log.begun or 'the start of the target'}")

    def _append(self, result: Result) -> None:
        with self._journal.open("a", encoding="utf-8") as journal:
            journal.write("\n" + json.dumps({ENDED: result.as_json()}) + "\n")
        self.log = RunLog.read(self._journal)

    def _tail(self) -> str:
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line[:160]}" for line in lines[-TAIL:])


def _chosen(known: Sequence[str], request: RunRequest) -> list[str]:
    for item in request.items:
        if item not in known:
            close = difflib.get_close_matches(item, known, 3)
            near = f"; close to it are {', '.join(close)}" if close else ""
            raise ArgumentError(f"--item {item!r} is no item of this target{near}")
    chosen = request.chosen(known)
    if not chosen:
        raise ArgumentError(f"-k {request.k!r} selects no item; `--list` shows them")
    return chosen


def _command(named: str, device: str, release: str) -> str:
    more = (f" --release {release}" if release else "") + (f" --device {device}" if device != "cpu" else "")
    return f"draftmark judge {named}{more}"
