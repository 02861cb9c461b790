"""Starts one process per backend, which tests the backend, and reads the report of that process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from .probing import Report, Verdict
from .rendering import printable


def examine(name: str, timeout: float) -> Report:
    """Probe one backend in its own process, which is killed after `timeout` seconds.

    A crash, a hang or a sys.exit of the plugin never raises here: the report has `Verdict.BROKEN` with a reason.
    """
    with tempfile.TemporaryDirectory(prefix="draftmark-doctor-") as folder:
        path = Path(folder) / "report.json"
        with (Path(folder) / "stderr").open("w+b") as stderr:
            code = _run([name, str(path)], timeout, stderr.fileno())
            stderr.seek(0)
            last_words = stderr.read()[-4096:].decode("utf-8", "replace")
        report = _read(path, name)
    if report.finished:
        return report
    return replace(report, reasons=[_how_it_ended(report.stage, code, timeout, last_words)])


def _run(arguments: list[str], timeout: float, stderr: int) -> int | None:
    """Return the exit code, or None after the timeout. Kills the whole session, child processes included."""
    # -P and PYTHONPATH: the child imports the same modules as this process, and none from the current directory.
    path = os.pathsep.join(filter(None, sys.path))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "draftmark_tools.cli.probing", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    )
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(path: Path, name: str) -> Report:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Report(name)
    return Report(**(fields | {"verdict": Verdict(fields["verdict"])}))


def _how_it_ended(stage: str, code: int | None, timeout: float, stderr: str) -> str:
    if code is None:
        return f"{stage} took longer than {timeout:g} s; raise --timeout, or run the plugin under a debugger"
    if code < 0:
        return f"{stage} crashed the process ({signal.Signals(-code).name}){_said(stderr)}; reinstall the plugin"
    return f"{stage} ended the process with exit code {code}{_said(stderr)}; a plugin must raise, not exit"


def _said(stderr: str) -> str:
    lines = [line.strip() for line in printable(stderr).splitlines() if line.strip()]
    return f", last line of stderr {lines[-1][:160]!r}" if lines else ""
