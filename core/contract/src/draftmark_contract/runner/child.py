"""Runs pytest with the suite in a child process of `draftmark contract`, and watches it until it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ..check import Tier
from .fresh import fresh
from .journal import Journal
from .limits import LIMIT_S
from .options import RunOptions
from .progress import JournalProgress

THREADS = "OMP_NUM_THREADS"
"""Environment variable that limits the threads of torch, and of NumPy's OpenBLAS or MKL."""
PREPARE = "DRAFTMARK_PREPARE"
"""Environment variable: with 0, opening a backend does not compile kernels that no batch needs yet."""
STALLED_S = 1.5 * LIMIT_S
"""Seconds without journal output before the process is killed: only native code can hang beyond an item's limit."""
ENDED = "ended"
"""File in the run's folder that holds the exit code of the run, once the child has printed the verdict."""
PARSED = "parsed.json"
"""File in the run's folder with the digests of the files that the probe parsed."""
TICK_S = 1.0
GRACE_S = 30.0
"""Seconds that an interrupted child has to print its results; after a second Ctrl-C it has none."""


@dataclass(frozen=True)
class ChildEnd:
    """States how a child process ended.

    Attributes:
        code: exit code of the process, negative for a signal.
        verdict: exit code of the verdict that the child printed; None if it printed no verdict.
        stalled: True if the child was killed because an item made no progress.
        interrupted: True after Ctrl-C or SIGTERM.
    """

    code: int
    verdict: int | None
    stalled: bool
    interrupted: bool


def run_child(options: RunOptions, folder: Path, journal: Journal) -> ChildEnd:
    """Run pytest to its end: show progress, forward Ctrl-C, and kill the child if an item makes no progress."""
    ended = folder / ENDED
    ended.unlink(missing_ok=True)
    progress = JournalProgress(journal.path)
    # In its own session the child receives no Ctrl-C from the terminal, so that this process can send exactly one
    # SIGINT.
    with subprocess.Popen(
        command(options, folder, journal.path),
        env=environment(options),
        stdout=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        output = _Forwarded(process.stdout, progress.stop)
        watch = _Watch(process, progress)
        try:
            code = watch.to_the_end()
        finally:
            watch.kill()
            progress.stop()
            output.end()
    verdict = int(ended.read_text(encoding="utf-8")) if ended.exists() else None
    return ChildEnd(code, verdict, watch.stalled, watch.interrupted)


class _Watch:
    """Waits for one child process, updates the progress display, and kills the child if it stalls."""

    def __init__(self, process: subprocess.Popen[str], progress: JournalProgress) -> None:
        self._process, self._progress = process, progress
        self.stalled = self.interrupted = False
        self._idle = 0.0

    def to_the_end(self) -> int:
        """Wait until the process ends, and return its exit code."""
        while True:
            try:
                code = self._wait()
                if code is not None:
                    return code
            except KeyboardInterrupt:
                if self.interrupted:
                    self.kill()
                self.interrupted, self._idle = True, 0.0
                self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        """Kill the process, if it still runs, and the workers that it started."""
        if self._process.poll() is not None:
            return
        # Windows has no process groups, so os.killpg is missing there.
        with suppress(ProcessLookupError, AttributeError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def _wait(self) -> int | None:
        start = time.monotonic()
        try:
            return self._process.wait(timeout=TICK_S)
        except subprocess.TimeoutExpired:
            # Count at most two ticks: while a container or a laptop was paused, no item could make progress.
            self._idle += min(time.monotonic() - start, 2 * TICK_S)
        if self._progress.tick() and not self.interrupted:
            self._idle = 0.0
        if self._idle > (GRACE_S if self.interrupted else STALLED_S):
            self.stalled = not self.interrupted
            self.kill()
        return None


class _Forwarded:
    """Copies the child's stdout to this process's stdout, in a thread."""

    def __init__(self, source: IO[str], before: Callable[[], None]) -> None:
        self._source, self._before = source, before
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._copy, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait until the rest of the child's output is copied.

        Raises:
            OSError: this process's stdout is closed or full.
        """
        self._thread.join(timeout=5.0)  # Do not wait forever: a process that the plugin started may keep the pipe open.
        if self._error is not None:
            raise self._error

    def _copy(self) -> None:
        for line in self._source:
            self._before()  # Remove the progress bar from the terminal before the results are printed.
            if self._error is None:
                try:
                    print(line, end="", flush=True)
                except OSError as error:
                    self._error = error


def command(options: RunOptions, folder: Path, journal: Path) -> list[str]:
    """Return the command of the pytest process; `folder` is a temporary folder of this run."""
    ini = folder / "pytest.ini"
    ini.write_text("[pytest]\n", encoding="utf-8")
    line = [sys.executable, "-m", "pytest", "--pyargs", "draftmark_contract", f"--attn-backend={options.name}"]
    line += [
        f"--attn-tier={options.highest}",
        f"--attn-journal={journal}",
        f"--attn-ended={folder / ENDED}",
        f"--attn-parent={os.getpid()}",
        *(f"--attn-item={one}" for one in options.items),
    ]
    # The caller's project must not influence the run: no configuration, no conftest, no added options. pytest's default
    # import mode would put this package's folder first; importlib imports the backend as `draftmark size` does.
    line += ["-c", str(ini), f"--rootdir={folder}", "--noconftest", "-o", "addopts=", "--import-mode=importlib"]
    # The suite prints the failures itself, on one screen and in its own order, so pytest prints none.
    line += ["-q", "-q", "--tb=no", "-rN", "--no-header", "-p", "no:cacheprovider", "--assert=plain"]
    # Its plugin imports all of Hypothesis to print a summary. The checks that use Hypothesis import it themselves.
    line += ["-p", "no:hypothesispytest"]
    outputs = {"json": options.json_path, "record": options.record_path, "html": options.html_path}
    line += [f"--attn-{kind}={Path(path).absolute()}" for kind, path in outputs.items() if path]
    line += [f"--attn-device={options.device}"] if options.device else []
    line += [f"--attn-parsed={folder / PARSED}"] if (folder / PARSED).exists() else []
    line += ["--attn-allow-known"] if options.allow_known else []
    line += [f"--attn-seed={options.seed}"] if options.seed is not None else []
    line += [f"--attn-sample={options.sample}"] if options.sample else []
    line += ["-k", options.k] if options.k else []
    line += ["--maxfail=1"] if options.stop_at_first else []
    line += ["--color=yes"] if sys.stdout.isatty() else []
    # By default xdist sends a worker dozens of consecutive items. Items that compile kernels are consecutive, so at the
    # end all other workers would wait for one. With one item at a time, a run with 14 workers takes 176 s instead of
    # 244 s.
    return line + (["-n", str(options.workers), "--maxschedchunk=1"] if options.workers else [])


def environment(options: RunOptions) -> dict[str, str]:
    """Return the environment of processes that run items, with the number of threads per worker.

    The caller's OMP_NUM_THREADS takes precedence. Otherwise workers of the device tier share the cores. Workers of the
    host tier get one thread, as torch does in the suite: tensors are tiny, and NumPy's threads in Triton's interpreter
    only waste processor time.
    """
    cores = os.cpu_count() or 1
    threads = max(1, cores // max(1, options.workers)) if options.highest is Tier.DEVICE else 1
    # An item opens a geometry for a few batches, so it compiles only the kernels that it launches.
    prepare = os.environ.get(PREPARE) or "0"
    return fresh({"PYTEST_ADDOPTS": "", THREADS: os.environ.get(THREADS) or str(threads), PREPARE: prepare})
