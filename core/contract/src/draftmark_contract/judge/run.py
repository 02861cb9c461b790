"""Runs a target's items in a child process. If an item ends that process, a new one runs the remaining items."""

from __future__ import annotations

import difflib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftmark.cli.errors import ArgumentError

from ..runner.fresh import fresh
from ..runner.item import item_of
from ..runner.limits import LIMIT_S
from ..runner.progress import Progress
from ..runner.stopped import INTERRUPTED, RunStopped, killed_from_outside
from .finding import finding
from .item import Outcome, Result
from .target import Engine
from .verdict import Verdict, rules_left_out
from .worker import BEGUN, CANNOT_WRITE, ENDED, FAILED, OPENED, STOPPED, RunRequest

GRACE_S = 30.0
"""Seconds after the time limit of an item, after which its process is ended: native code does not end by the limit."""
TAIL = 12
"""Number of output lines shown for a process that ended before the target was open."""


@dataclass(frozen=True)
class RunLog:
    """Holds the contents of the journal (one JSON line per event) that the worker processes write.

    Attributes:
        about: the target's facts and items, or {} until the target is open.
        failed: reason why the target could not be opened, or "".
        results: finished items by id.
        begun: id of the item that started last, or "".
        stopped: reason why the run cannot go on, or "".
    """

    about: dict[str, Any]
    failed: str
    results: dict[str, Result]
    begun: str
    stopped: str = ""

    @classmethod
    def read(cls, journal: Path) -> RunLog:
        """Read a journal; lines that a crash cut short are skipped."""
        about: dict[str, Any] = {}
        failed, begun, stopped, results = "", "", "", {}
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
            elif kind == STOPPED:
                stopped = value
            elif kind == ENDED:
                results[value["item"]] = Result.from_json(value)
        return cls(about, failed, results, begun, stopped)


def judge(
    engine: Engine,
    target: str,
    device: str,
    items: Sequence[str] = (),
    k: str = "",
    sample: int = 0,
    stop_at_first: bool = False,
    limit: float = LIMIT_S,
) -> Verdict:
    """Judge one backend.

    Args:
        engine: engine that the backend belongs to.
        target: name of the backend.
        device: torch device.
        items: ids of the only items to run; () for all.
        k: run only items with this text in their id.
        sample: maximum number of items per rule; 0 for all.
        stop_at_first: end after the first wrong item.
        limit: seconds for one item.

    Raises:
        ArgumentError: the target has no such item, or no id contains `k`.
    """
    named = f"{engine.name}:{target}"
    with tempfile.TemporaryDirectory() as folder:
        command = _command(named, device, getattr(engine, "release", ""))
        request = RunRequest(
            *(engine.name, target, device, command, f"{folder}/journal", tuple(items), k, sample),
            stop_at_first=stop_at_first,
            limit=limit,
        )
        run, stopped = _Run(engine, request), ""
        try:
            run.all()
        except KeyboardInterrupt:  # The caller prints the finished items, and the reason why there is no verdict.
            stopped = INTERRUPTED
        except RunStopped as error:
            stopped = str(error)
        about = run.log.about
        if not about:
            return Verdict(named, error="" if stopped else run.error(), stopped=stopped)
        known = [one["id"] for one in about["items"]]
        chosen = _chosen(known, request)
        left = rules_left_out([one["rule"] for one in about["items"]], about["left_out"])
        results = [run.log.results[one] for one in chosen if one in run.log.results]
        at_first = stop_at_first and any(one.outcome is Outcome.WRONG for one in results)
        if missing := 0 if at_first else len(chosen) - len(results):
            stopped = stopped or f"its process ended outside of any item, with {missing:,} items left\n{run.tail()}"
        selected = len(chosen) < len(known) or at_first
        machine = about["machine"]
        return Verdict(named, about["facts"], len(known), results, left, selected, machine=machine, stopped=stopped)


def listed(engine: Engine, target: str, device: str) -> tuple[list[dict[str, str]], str]:
    """Return the target's items without running them, and the reason why it could not be opened ("" if it opened)."""
    with tempfile.TemporaryDirectory() as folder:
        request = RunRequest(engine.name, target, device, "", f"{folder}/journal", list_only=True)
        run = _Run(engine, request)
        run.work(request)
        return run.log.about.get("items", []), "" if run.log.about else run.error()


class _Run:
    """Starts worker processes one after another until all items have run. They share one journal."""

    def __init__(self, engine: Engine, request: RunRequest) -> None:
        self.request = request
        self._journal = Path(request.journal)
        self._output = self._journal.with_name("log")
        self._environment = fresh(engine.environment(request.target, request.device))
        self.log = RunLog({}, "", {}, "")
        self._hung = ""

    def all(self) -> None:
        """Run all items. An item that ends its process counts as wrong, and a new process runs the remaining items.

        Raises:
            RunStopped: a process ended for a reason that the backend did not cause.
        """
        while True:
            before = len(self.log.results)
            code = self.work(replace(self.request, skip=tuple(self.log.results)))
            begun = self.log.begun
            if code == CANNOT_WRITE:
                raise RunStopped(f"the temporary folder {self._journal.parent} cannot be written; free space there")
            hung = bool(begun) and self._hung == begun
            if reason := self.log.stopped or ("" if hung else killed_from_outside(code, begun)):
                raise RunStopped(reason)
            if begun and begun not in self.log.results:
                how = f"ended the process with code {code} (a crash or os._exit)"
                how = f"took longer than {self.request.limit:g} s in native code" if hung else how
                self._append(self._died(begun, f"this item {how}\n{self.tail()}"))
                if self.request.stop_at_first:
                    return
            elif code == 0 or not self.log.about or len(self.log.results) == before:
                # The run is finished, or the process ended outside an item. The verdict counts the items that did not
                # run.
                return

    def _died(self, begun: str, said: str) -> Result:
        one = next(one for one in self.log.about["items"] if one["id"] == begun)
        item = item_of(one["rule"], one["case"], lambda: None, one["asks"])
        return Result(begun, Outcome.WRONG, finding(said, item, self.request.command))

    def work(self, request: RunRequest) -> int:
        """Run one worker process to its end and return its exit code."""
        path = self._journal.with_name("request")
        self._write(path, request.as_json(), "w")
        with self._output.open("ab") as log:
            command = [sys.executable, "-m", "draftmark_contract.judge.worker", str(path)]
            with subprocess.Popen(command, env=self._environment, stdout=log, stderr=log) as process:
                try:
                    return self._watch(process)
                finally:
                    process.kill()
                    self.log = RunLog.read(self._journal)

    def error(self) -> str:
        """Return the reason why the target could not be opened."""
        return self.log.failed or f"its process ended before it was open:\n{self.tail()}"

    def _watch(self, process: subprocess.Popen[bytes]) -> int:
        progress = Progress("draftmark judge")
        begun, since = "", 0.0
        try:
            while True:
                try:
                    return process.wait(timeout=1.0)
                except subprocess.TimeoutExpired:
                    log = RunLog.read(self._journal)
                    total = len(self.request.chosen([one["id"] for one in log.about.get("items", [])]))
                    if log.begun != begun or begun in log.results:
                        begun, since = log.begun, time.monotonic()
                    elif begun and time.monotonic() - since > self.request.limit + GRACE_S:
                        self._hung = begun
                        process.kill()
                    progress.show(len(log.results), total, log.begun.partition("[")[0] or "start of the target")
        finally:
            progress.stop()

    def _append(self, result: Result) -> None:
        self._write(self._journal, "\n" + json.dumps({ENDED: result.as_json()}) + "\n", "a")
        self.log = RunLog.read(self._journal)

    def _write(self, path: Path, text: str, mode: str) -> None:
        try:
            with path.open(mode, encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise RunStopped(f"{path} cannot be written ({error.strerror}); free space there") from error

    def tail(self) -> str:
        """Return the last lines that the worker processes printed."""
        lines = self._output.read_text(encoding="utf-8", errors="replace").splitlines()
        return "\n".join(f"  {line[:160]}" for line in lines[-TAIL:])


def _chosen(known: Sequence[str], request: RunRequest) -> list[str]:
    for item in request.items:
        if item not in known:
            close = difflib.get_close_matches(item, known, 3)
            near = f"; close to it are {', '.join(close)}" if close else ""
            raise ArgumentError(f"--item {item!r} is no item of this target{near}")
    chosen = request.chosen(known)
    if known and not chosen:
        raise ArgumentError(f"-k {request.k!r} selects no item; `--list` shows them")
    return chosen


def _command(named: str, device: str, release: str) -> str:
    more = (f" --release {release}" if release else "") + (f" --device {device}" if device != "cpu" else "")
    return f"draftmark judge {named}{more}"
