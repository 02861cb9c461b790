"""Starts the worker processes of a run, gives them one item at a time, and replaces those that an item has ended."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO, Any

from draftmark.errors import DraftmarkError

from .explanation import again, heading
from .fresh import fresh
from .limits import LIMIT_S
from .outcome import Outcome, Result
from .stopped import RunStopped, killed_from_outside
from .subject import Listed, Opened, Opening
from .worker import Answer

GRACE_S = 30.0
"""Seconds after the time limit of an item, after which its process is killed: only native code exceeds the limit."""
TICK_S = 1.0
ENDS_S = 10.0
"""Seconds to wait for the end of a process that has closed its pipe."""
TAIL = 12
"""Number of lines of a process's output that a message quotes."""
FAILING = (Outcome.FAILED, Outcome.DECLARED, Outcome.UPCOMING)
"""Outcomes of failed items, also of declared failures and of items newer than the contract that the plugin targets."""
Row = tuple[str, Any]
Events = queue.SimpleQueue[tuple["_Process", Row | None]]


class _Process:
    """One worker process, with the item that it runs.

    Attributes:
        busy: item under way, "" for another command; None while the process waits for a command.
        opened: True once the subject is open in the process.
        hung: True after `kill` because of a time limit.
    """

    def __init__(self, opening: Opening, events: Events) -> None:
        command = [sys.executable, "-m", "draftmark_contract.runner.worker", str(os.getpid())]
        pipe = subprocess.PIPE
        # In its own session a worker gets no Ctrl-C from the terminal; the parent ends it.
        self._process = subprocess.Popen(
            command, env=fresh(opening.environment), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        self.busy: str | None = None
        self.opened = self.hung = False
        self._idle_s, self._gone = 0.0, 0
        self._tail: deque[str] = deque(maxlen=TAIL)
        for target in (lambda: self._read(events), self._listen):
            threading.Thread(target=target, daemon=True).start()

    def send(self, command: str, value: Any) -> None:
        """Write one command. A process that has ended gets none; its end is an event of its own."""
        self.busy, self._idle_s = value if command == "run" else "", 0.0
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(json.dumps({command: value}).encode() + b"\n")
            self._process.stdin.flush()

    def tick(self, seconds: float, limit: float) -> bool:
        """Kill a process that exceeds its limit. Return True for one that has ended while a copy holds its pipe."""
        if self._process.poll() is not None:
            self._gone += 1
            return self._gone > 1
        # Count at most two ticks: while a container or a laptop was paused, no item could make progress.
        self._idle_s += min(seconds, 2 * TICK_S)
        if self.busy is not None and self._idle_s > limit + GRACE_S:
            self.hung = True
            self.kill()
        return False

    def close(self) -> None:
        """Close the pipe of commands, which ends a process that waits for one."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process, if it still runs, and the processes that it started."""
        if self._process.poll() is None:
            # Windows has no process groups, so os.killpg is missing there.
            with suppress(ProcessLookupError, AttributeError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.kill()

    def code(self) -> int:
        """Return the exit code of a process that has closed its pipe."""
        try:
            return self._process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def said(self) -> str:
        """Return the last lines that the process has printed, each on a new line; "" if it has printed nothing."""
        return "".join(f"\n  {line[:160]}" for line in self._tail)

    def _read(self, events: Events) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            [row] = json.loads(line).items()
            events.put((self, row))
        events.put((self, None))

    def _listen(self) -> None:
        output: IO[bytes] | None = self._process.stderr
        assert output is not None
        while line := output.readline(4096):
            self._tail.append(line.decode(errors="replace").rstrip())


class Pool:
    """Worker processes of one run, which all open the same subject. Use it as a context manager.

    Args:
        opening: subject to open.
        limit: seconds for one item, and to open the subject.
        workers: largest number of processes at a time.

    Attributes:
        late: items that took longer than the limit, if it is below `LIMIT_S`. They are unjudged.
    """

    def __init__(self, opening: Opening, limit: float = LIMIT_S, workers: int = 1) -> None:
        self._opening, self._limit, self._workers = opening, limit, workers
        self.late: list[str] = []
        self._events: Events = queue.SimpleQueue()
        self._processes: list[_Process] = []
        self._ticked = time.monotonic()
        self._command = ""

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.end(at_once=bool(kind))

    def end(self, at_once: bool = False) -> None:
        """End all processes. One that waits for a command can exit by itself, unless `at_once` is True."""
        for one in self._processes:
            one.kill() if at_once or one.busy is not None else one.close()
        for one in self._processes:
            one.code()
        self._processes = []

    def open(self) -> Opened:
        """Open the subject in the first process.

        Raises:
            DraftmarkError: it cannot be opened; the message is a clause that continues "because".
        """
        one = self._start()
        kind, value = self._answer(one)
        if kind != Answer.OPENED:
            raise DraftmarkError(value)
        one.busy, one.opened = None, True
        opened = Opened.from_json(value)
        self._command = opened.command
        return opened

    def ask_for_items(self) -> None:
        """Ask the first process for the items of the subject. The answer is read by `items`."""
        self._processes[0].send("list", None)

    def items(self) -> tuple[list[Listed], dict[str, str]]:
        """Return the items of the subject, and the rules that have none with the reasons.

        Raises:
            DraftmarkError: the process ended.
        """
        one = self._processes[0]
        kind, value = self._answer(one)
        if kind != Answer.LISTED:
            raise DraftmarkError(value)
        one.busy = None
        return [Listed.from_json(row) for row in value["items"]], value["left_out"]

    def run(self, items: Sequence[Listed], started: Callable[[str], None] = lambda item: None) -> Iterator[Result]:
        """Run items, in their order, and yield each result as its item ends. `started` is called at every tick, too.

        An item in which memory ran out while others ran runs again at the end, when no other process is left. An item
        that takes longer than a limit below `LIMIT_S` is unjudged.

        Raises:
            RunStopped: the run cannot go on, for a reason that is not the backend's.
        """
        tiers, left = {one.id: one.tier.value for one in items}, deque(one.id for one in items)
        alone: deque[str] = deque()
        while left or alone or any(one.busy for one in self._processes):
            if not left and not any(one.busy for one in self._processes):
                self.end()
                left, alone, self._workers = alone, deque(), 1
            self._supply(left, started)
            process, row = self._next(started)
            if process not in self._processes:
                continue
            if row is None:
                item = self._ended(process)
                yield self._judged(self._died(process, item, tiers[item]))
            elif row[0] == Answer.ENDED:
                process.busy = None
                if not row[1]["more"]:
                    self._processes.remove(process)
                yield self._judged(Result.from_json(row[1]["result"]))
            elif row[0] == Answer.OPENED:
                process.opened = True
            elif row[0] == Answer.LACKED and self._workers > 1 and process.busy:
                alone.append(process.busy)
                self._processes.remove(process)
            else:
                raise RunStopped(f"in a further process {row[1]}" if row[0] == Answer.FAILED else row[1])

    def too_short(self, results: Iterable[Result]) -> str:
        """Return why the time limit leaves no verdict, as a clause; "" if it ended no item, or if an item failed.

        Args:
            results: all results of the run, also those of an earlier run with the same journal.
        """
        if not self.late or any(one.outcome is Outcome.FAILED for one in results):
            return ""
        more = f" and {len(self.late) - 1:,} more took" if self.late[1:] else " took"
        return (
            f"{self.late[0]}{more} longer than the limit of {self._limit:g} s, and only an item that takes longer than "
            f"{LIMIT_S:g} s fails; repeat the run with a larger limit"
        )

    def _judged(self, result: Result) -> Result:
        """Return a result, unjudged if only a limit below the default one ended its item."""
        if result.outcome not in FAILING or not self._limit <= result.seconds < LIMIT_S:
            return result
        self.late.append(result.item)
        message = f"took longer than the limit of {self._limit:g} s; repeat it with a larger limit"
        return replace(result, outcome=Outcome.UNJUDGED, message=message, marks=(), drawing=None)

    def _supply(self, left: deque[str], started: Callable[[str], None]) -> None:
        """Give each waiting process an item, and start processes while items and places are left."""
        while left:
            waiting = next((one for one in self._processes if one.busy is None), None)
            if waiting is None and len(self._processes) >= self._workers:
                return
            item = left.popleft()
            (waiting or self._start()).send("run", item)
            started(item)

    def _start(self) -> _Process:
        one = _Process(self._opening, self._events)
        self._processes.append(one)
        one.send("open", {"module": self._opening.module, "arguments": dict(self._opening.arguments)})
        return one

    def _answer(self, process: _Process) -> Row:
        """Return the next answer of the only process."""
        _, row = self._next()
        if row is not None:
            return row
        code = process.code()
        how = f"took longer than {self._limit:g} s" if process.hung else f"ended the process with code {code}"
        reason = "" if process.hung else killed_from_outside(code, "")
        return Answer.FAILED, reason or f"opening it {how}{process.said()}"

    def _next(self, tick: Callable[[str], None] = lambda item: None) -> tuple[_Process, Row | None]:
        """Return the next answer of a process, or None for its end. Kill processes that exceed their time limit."""
        while True:
            now = time.monotonic()
            if now - self._ticked >= TICK_S:
                seconds, self._ticked = now - self._ticked, now
                if ended := next((one for one in self._processes if one.tick(seconds, self._limit)), None):
                    return ended, None
                tick("")
            with suppress(queue.Empty):
                return self._events.get(timeout=TICK_S)

    def _ended(self, process: _Process) -> str:
        """Return the item that ended a process.

        Raises:
            RunStopped: the process ended for another reason.
        """
        self._processes.remove(process)
        code = process.code()
        if not process.hung and (reason := killed_from_outside(code, process.busy or "")):
            raise RunStopped(reason)
        if not process.busy or not process.opened:
            raise RunStopped(f"a process of the run ended with code {code} outside of any item{process.said()}")
        return process.busy

    def _died(self, process: _Process, item: str, tier: str) -> Result:
        """Return the result of an item that ended its process."""
        how = f"ended the process with code {process.code()} (a crash or os._exit)"
        how = f"took longer than {self._limit:g} s in native code" if process.hung else how
        message = [*heading(item.partition("[")[0]), f"this item {how}{process.said()}", again(self._command, item)]
        return Result(item, tier, Outcome.FAILED, "\n".join(message), self._limit if process.hung else 0.0)
