"""Processes of the benchmark: a server that starts, is ready, and ends, and a client."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .client import Job
from .compilations import MONITOR

POLL_S = 0.1
GONE_S = 15.0
"""Seconds in which the processes of a killed server must have ended."""
ERROR = re.compile(r"(?:\([^)]*\) )?(?:(?:ERROR|CRITICAL) [\d: -]+\[[^]]*\] )?[\w.]*(?:Error|Exception)\b: ")
"""Last line of a traceback, also after vLLM's name of the process and prefix of its log."""
FOLDER = re.compile(r"(?:/[\w.+-]+)+/")


def free_port() -> int:
    """Return a port that no process uses now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Process:
    """A running server in a process group of its own.

    Args:
        command: command line.
        environment: whole environment.
        log: file for its output; appended to.
        port: port that it serves.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, port: int) -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        self._log_start = log.stat().st_size if log.exists() else 0
        self.began = time.monotonic()
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                command, env=dict(environment), stdout=out, stderr=out, start_new_session=True
            )

    def state(self) -> str:
        """Return "ready" if the server answers its health check, "ended" if its process has ended, else "starts"."""
        if self._process.poll() is not None:
            return "ended"
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return "ready"
        except (urllib.error.URLError, OSError):
            return "starts"

    def reason(self) -> str:
        """Return the line of the log that tells best why the server ended, without names of folders."""
        with self.log.open("rb") as file:
            file.seek(self._log_start)
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        monitored = [line for line in lines if MONITOR.search(line) and "Error" in line]
        errors = [line for line in lines if ERROR.match(line)]
        found = (monitored[:1] or errors[:1] or lines[-1:] or ["no output"])[0]
        return FOLDER.sub("…/", found)[-400:]

    def end(self) -> None:
        """Kill all processes of the server, and wait until they are gone and their GPU memory is free."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        until = time.monotonic() + GONE_S
        with suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(self._process.pid, 0)
                time.sleep(POLL_S)


def wait_for(processes: Mapping[int, Process], seconds: float) -> dict[int, float]:
    """Wait until each server is ready or has ended, or the time is over; return the start seconds of the ready ones."""
    found: dict[int, float] = {}
    waiting, until = dict(processes), time.monotonic() + seconds
    while waiting and time.monotonic() < until:
        for number, process in list(waiting.items()):
            state = process.state()
            if state != "starts":
                del waiting[number]
            if state == "ready":
                found[number] = round(time.monotonic() - process.began, 2)
        time.sleep(POLL_S)
    return found


def ask(job: Job, folder: Path, seconds: float) -> list[dict[str, Any]]:
    """Run a client, and return its answers; none if it fails or takes longer than `seconds`."""
    sent, received = folder / "job.json", folder / "answers.json"
    received.unlink(missing_ok=True)
    job.write(sent)
    command = [sys.executable, "-m", "benchmarks.serving.client", str(sent), str(received)]
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(command, timeout=seconds, check=False)
    return json.loads(received.read_text()) if received.exists() else []
