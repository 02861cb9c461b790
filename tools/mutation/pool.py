"""Runs jobs in forked processes, a fixed number at a time, and continues if a job crashes its process.

A forked process inherits torch, the suite and its cases. Its changes of memory end with the process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

SILENT_S = 3600.0
"""Seconds without output after which a process is ended. One item can take more than ten minutes on a busy machine."""
MEMORY = 6 * 2**30
"""Resident bytes at which a process is ended. The address space has no limit: a pool of 2**31 elements is sparse."""
LOOK_S = 0.5
"""Seconds between two looks at time and memory of the processes."""

Send = Callable[[dict[str, Any]], None]
Work = Callable[[Send], None]
"""Runs in the fork; the parent reads the rows that it sends."""


@dataclass
class _Fork:
    """One running job: a forked process, its pipe, and the rows that it has sent."""

    job: str
    pid: int
    pipe: int
    text: bytes = b""
    rows: list[dict[str, Any]] = field(default_factory=list)
    last_output: float = field(default_factory=time.monotonic)

    def watch(self) -> None:
        """Kill the process if it sent nothing for too long or uses too much memory."""
        if time.monotonic() - self.last_output > SILENT_S or _resident(self.pid) > MEMORY:
            os.kill(self.pid, signal.SIGKILL)


def run(jobs: Iterator[tuple[str, Work]], workers: int) -> Iterator[tuple[str, list[dict[str, Any]], int]]:
    """Yield (job, rows that it sent, exit code), in the order in which jobs end. A signal gives a negative code.

    A job is taken from the iterator only when a process is free, so results of earlier jobs can change it.
    """
    running: dict[int, _Fork] = {}
    try:
        while True:
            while len(running) < workers and (job := next(jobs, None)) is not None:
                one = _start(*job)
                running[one.pipe] = one
            if not running:
                return
            ready, _, _ = select.select(list(running), [], [], LOOK_S)
            for one in running.values():
                one.watch()
            for pipe in ready:
                if not _read(running[pipe]):
                    one = running.pop(pipe)
                    os.close(pipe)
                    yield one.job, one.rows, os.waitstatus_to_exitcode(os.waitpid(one.pid, 0)[1])
    finally:
        for one in running.values():
            os.kill(one.pid, signal.SIGKILL)
            os.waitpid(one.pid, 0)


def _start(job: str, work: Work) -> _Fork:
    pipe, end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(end)
        return _Fork(job, pid, pipe)
    code = 1
    try:
        os.close(pipe)
        work(lambda row: _write(end, row))
        code = 0
    except BaseException:
        traceback.print_exc()  # os._exit below would hide the error
    finally:
        os._exit(code)


def _write(pipe: int, row: dict[str, Any]) -> None:
    text = json.dumps(row).encode() + b"\n"
    while text:
        text = text[os.write(pipe, text) :]


def _read(one: _Fork) -> bool:
    """Read a job's available output from its pipe; return False at the end of the output."""
    text = os.read(one.pipe, 1 << 16)
    one.last_output = time.monotonic()
    *lines, one.text = (one.text + text).split(b"\n")
    one.rows += [json.loads(line) for line in lines]
    return bool(text)


def _resident(pid: int) -> int:
    """Return the resident bytes of a process, or 0 if it has just ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
