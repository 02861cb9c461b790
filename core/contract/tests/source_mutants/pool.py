"""Runs jobs in forked processes, so many at a time, and survives whatever a job does to its process.

A fork has torch, the suite and its cases already; nothing that a mutant changes in memory outlives it.
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
"""A process that says nothing for so long is ended. Ten minutes were too few for one item on a crowded machine."""
MEMORY = 6 * 2**30
"""So is one that has so many bytes in memory. No limit on address space: a pool of 2**31 elements is sparse."""
LOOK_S = 0.5
"""How often that is looked at."""

Say = Callable[[dict[str, Any]], None]
Work = Callable[[Say], None]
"""Runs in the fork; what it says, the parent reads."""


@dataclass
class _Fork:
    """One running job."""

    job: str
    pid: int
    pipe: int
    text: bytes = b""
    rows: list[dict[str, Any]] = field(default_factory=list)
    heard: float = field(default_factory=time.monotonic)

    def watch(self) -> None:
        """End it if it has been silent for too long or takes too much memory."""
        if time.monotonic() - self.heard > SILENT_S or _resident(self.pid) > MEMORY:
            os.kill(self.pid, signal.SIGKILL)


def run(jobs: Iterator[tuple[str, Work]], workers: int) -> Iterator[tuple[str, list[dict[str, Any]], int]]:
    """(job, what it said, its exit code; negative for a signal), in the order in which jobs end.

    A job is taken from the iterator only when there is a process for it, so what is known by then can shape it.
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
        traceback.print_exc()  # nothing else would: the process ends here
    finally:
        os._exit(code)


def _write(pipe: int, row: dict[str, Any]) -> None:
    text = json.dumps(row).encode() + b"\n"
    while text:
        text = text[os.write(pipe, text) :]


def _read(one: _Fork) -> bool:
    """Take what there is; False at the end."""
    text = os.read(one.pipe, 1 << 16)
    one.heard = time.monotonic()
    *lines, one.text = (one.text + text).split(b"\n")
    one.rows += [json.loads(line) for line in lines]
    return bool(text)


def _resident(pid: int) -> int:
    """Bytes that a process has in memory; none when it has just ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0
