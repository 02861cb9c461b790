"""Functions that the command line calls: `draftmark contract` and `draftmark prove`."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from draftmark.errors import DraftmarkError
from draftmark.registry import load

from ..check import Tier
from .failures import verdict_lines
from .fresh import fresh
from .journal import ForeignJournal, Journal
from .judging import judge
from .limits import LIMIT_S
from .options import RunOptions, WrongArguments
from .outputs import write_outputs
from .probe import probe
from .session import DEVICE_LOST

Say = Callable[[str], None]
NO_ITEMS = 5
"""pytest's exit code if no item was selected."""
PYTEST_ENDED = (0, 1, 2, NO_ITEMS)
"""pytest's exit codes of a finished or interrupted run, or a run without items."""
DIED = "the process ended with code {} in this item (a crash, os._exit or a hang)"
THREADS = "OMP_NUM_THREADS"
"""Environment variable that limits the threads of torch, and of NumPy's OpenBLAS or MKL."""
STALLED_S = 1.5 * LIMIT_S
"""Seconds without journal output before the process is killed: only native code can hang beyond an item's limit."""


def run_contract(
    name: str,
    tier: str = "host",
    json_path: str | None = None,
    html_path: str | None = None,
    k: str | None = None,
    device: str | None = None,
    workers: int = 0,
    sample: int = 0,
    journal_path: str | None = None,
    items: Sequence[str] = (),
    record_path: str | None = None,
    allow_known: bool = False,
    seed: int | None = None,
) -> int:
    """Judge one backend in a child process and print the verdict. See `RunOptions` for the arguments.

    An item fails if it ends its process (a crash, `os._exit`), destroys the device context or hangs in native code. The
    other items still run. There is always a verdict, also on a backend that does not load.

    Returns:
        0 if the backend conforms, or if nothing failed in a selection of items; 2 for wrong arguments; 1 otherwise.
    """
    options = RunOptions(
        name,
        tier,
        json_path,
        record_path,
        html_path,
        k,
        tuple(items),
        device,
        workers,
        sample,
        journal_path,
        allow_known,
        seed,
    )
    try:
        options.check()
        begin = probe(name, options.highest, device or "")
        if "unusable" in begin:
            raise WrongArguments(f"the device tier cannot run here: {begin['unusable']}")
        if "error" in begin:
            return _without_backend(options, f"it does not load: {begin['error']}")
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(Path(journal_path or Path(folder, "journal.jsonl")).absolute())
            journal.begin(begin["judged"], begin["run"])
            return _run(options, journal, Path(folder))
    except (WrongArguments, ForeignJournal) as error:
        print(f"draftmark contract: {error}", file=sys.stderr)
        return 2


def prove(name: str, say: Say = print) -> int:
    """Prove the sizing of one backend; print each theorem and its status.

    Args:
        name: name of the backend.
        say: prints a line.

    Returns:
        0 if no theorem is refuted or undecided, else 1.

    Raises:
        DraftmarkError: z3 is not installed, or the backend does not load.
    """
    if importlib.util.find_spec("z3") is None:
        raise DraftmarkError("proofs need z3-solver, which is not installed; pip install 'draftmark-contract[proof]'")
    from ..backend_under_test import BackendUnderTest
    from ..proof.prover import prove_all
    from ..proof.table import proof_table

    start = time.monotonic()
    proofs = prove_all(BackendUnderTest(load(name), "cpu", Tier.SIZING))
    say(proof_table(name, proofs))
    say(f"{time.monotonic() - start:.1f} s")
    return int(any(proof.fails for proof in proofs))


def _run(options: RunOptions, journal: Journal, folder: Path) -> int:
    """Run the items to the verdict, starting a new process whenever an item ends the current one."""
    command = _command(options, folder, journal.path)
    while True:
        ended = len(journal.ended())
        code = _watch(command, _environment(options), journal.path)
        if code in PYTEST_ENDED:
            if code == NO_ITEMS:
                print(f"draftmark contract: -k {options.k!r} selects no item", file=sys.stderr)
            return 2 if code == NO_ITEMS else code
        if code == DEVICE_LOST and len(journal.ended()) > ended:  # without progress, the plugin itself exited with it
            continue
        if not journal.fail_unfinished(DIED.format(code)):
            return _without_backend(options, f"the run ended with code {code} outside of any item", journal)


def _without_backend(options: RunOptions, error: str, journal: Journal | None = None) -> int:
    """Write and print the verdict of a run that could not judge, and return 1."""
    verdict = judge(options.name, None, list(journal.ended().values()) if journal else [], error)
    write_outputs(verdict, options.json_path, options.record_path, options.html_path)
    print("\n".join(verdict_lines(verdict)))
    return 1


def _command(options: RunOptions, folder: Path, journal: Path) -> list[str]:
    ini = folder / "pytest.ini"
    ini.write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "--pyargs", "draftmark_contract", f"--attn-backend={options.name}"]
    command += [
        f"--attn-tier={options.highest}",
        f"--attn-journal={journal}",
        *(f"--attn-item={one}" for one in options.items),
    ]
    # The caller's project must not influence the run: no configuration, no conftest, no added options. pytest's default
    # import mode would put this package's folder first; importlib imports the backend as `draftmark size` does.
    command += ["-c", str(ini), f"--rootdir={folder}", "--noconftest", "-o", "addopts=", "--import-mode=importlib"]
    # The suite shows the failures itself: one screen, in its own order.
    command += ["-q", "-q", "--tb=no", "-rN", "--no-header", "-p", "no:cacheprovider", "--assert=plain"]
    outputs = {"json": options.json_path, "record": options.record_path, "html": options.html_path}
    command += [f"--attn-{kind}={Path(path).absolute()}" for kind, path in outputs.items() if path]
    command += [f"--attn-device={options.device}"] if options.device else []
    command += ["--attn-allow-known"] if options.allow_known else []
    command += [f"--attn-seed={options.seed}"] if options.seed is not None else []
    command += [f"--attn-sample={options.sample}"] if options.sample else []
    command += ["-k", options.k] if options.k else []
    # By default xdist sends a worker dozens of consecutive items. Items that compile kernels are consecutive, so all
    # workers would wait for one at the end. Sending one item at a time takes 176 s instead of 244 s with 14 workers.
    return command + (["-n", str(options.workers), "--maxschedchunk=1"] if options.workers else [])


def _environment(options: RunOptions) -> dict[str, str]:
    """Return the environment of processes that run items, with the number of threads per worker.

    The caller's OMP_NUM_THREADS takes precedence. Otherwise workers of the device tier share the cores. Workers of the
    host tier get one thread, as torch does in the suite: tensors are tiny, and NumPy's threads in Triton's interpreter
    only waste processor time.
    """
    cores = os.cpu_count() or 1
    threads = max(1, cores // max(1, options.workers)) if options.highest is Tier.DEVICE else 1
    return fresh({"PYTEST_ADDOPTS": "", THREADS: os.environ.get(THREADS) or str(threads)})


def _watch(command: list[str], environment: dict[str, str], journal: Path) -> int:
    """Run pytest to its end, and kill it if an item makes no progress."""
    with subprocess.Popen(command, env=environment) as process, _ended_with(process):
        seen, since = -1, time.monotonic()
        while True:
            try:
                return process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                size = journal.stat().st_size if journal.exists() else 0
                if size != seen:
                    seen, since = size, time.monotonic()
                elif time.monotonic() - since > STALLED_S:
                    process.kill()


@contextmanager
def _ended_with(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Terminate the child process if this process receives SIGTERM."""

    def end(signum: int, frame: object) -> None:
        process.terminate()
        raise SystemExit(128 + signum)

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
