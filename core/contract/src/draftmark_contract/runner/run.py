"""What the command line calls: `draftmark contract` and `draftmark prove`."""

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
from .asked import Asked, WrongArguments
from .failures import verdict_lines
from .fresh import fresh
from .journal import ForeignJournal, Journal
from .judging import judge
from .limits import LIMIT_S
from .outputs import write_outputs
from .probe import probe
from .session import DEVICE_LOST

Say = Callable[[str], None]
NO_ITEMS = 5
"""pytest's exit code of a run without items."""
PYTEST_ENDED = (0, 1, 2, NO_ITEMS)
"""Exit codes of a run that came to its end, was interrupted, or had nothing to do."""
DIED = "the process ended with code {} in this item (a crash, os._exit or a hang)"
THREADS = "OMP_NUM_THREADS"
"""Heeded by torch, and by the OpenBLAS and MKL that NumPy comes with."""
STALLED_S = 1.5 * LIMIT_S
"""No item takes longer than its limit, unless native code hangs: then the process is ended from outside."""


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
    """Judge one backend in a process of its own, and print the verdict; the arguments are those of `Asked`.

    An item that ends the process (a crash, `os._exit`), costs it the device or hangs in native code fails, and the rest
    still runs. There is a verdict in any case, also on a backend that does not load.

    Returns:
        0 when the backend conforms, or nothing failed in a selection of items; 2 for wrong arguments; 1 otherwise.
    """
    asked = Asked(
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
        asked.check()
        begin = probe(name, asked.highest, device or "")
        if "unusable" in begin:
            raise WrongArguments(f"the device tier cannot run here: {begin['unusable']}")
        if "error" in begin:
            return _without_backend(asked, f"it does not load: {begin['error']}")
        with tempfile.TemporaryDirectory() as folder:
            journal = Journal(Path(journal_path or Path(folder, "journal.jsonl")).absolute())
            journal.begin(begin["judged"], begin["run"])
            return _run(asked, journal, Path(folder))
    except (WrongArguments, ForeignJournal) as error:
        print(f"draftmark contract: {error}", file=sys.stderr)
        return 2


def prove(name: str, say: Say = print) -> int:
    """Prove the sizing of one backend; print each theorem and its status.

    Returns:
        0 when none is refuted or undecided, else 1.

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


def _run(asked: Asked, journal: Journal, folder: Path) -> int:
    """Run the items, in as many processes one after another as they end, to the verdict."""
    command = _command(asked, folder, journal.path)
    while True:
        ended = len(journal.ended())
        code = _watch(command, _environment(asked), journal.path)
        if code in PYTEST_ENDED:
            if code == NO_ITEMS:
                print(f"draftmark contract: -k {asked.k!r} selects no item", file=sys.stderr)
            return 2 if code == NO_ITEMS else code
        if code == DEVICE_LOST and len(journal.ended()) > ended:  # or a plugin ended it with that very code
            continue
        if not journal.fail_unfinished(DIED.format(code)):
            return _without_backend(asked, f"the run ended with code {code} outside of any item", journal)


def _without_backend(asked: Asked, error: str, journal: Journal | None = None) -> int:
    """The verdict of a run whose process could not give one."""
    verdict = judge(asked.name, None, list(journal.ended().values()) if journal else [], error)
    write_outputs(verdict, asked.json_path, asked.record_path, asked.html_path)
    print("\n".join(verdict_lines(verdict)))
    return 1


def _command(asked: Asked, folder: Path, journal: Path) -> list[str]:
    ini = folder / "pytest.ini"
    ini.write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "--pyargs", "draftmark_contract", f"--attn-backend={asked.name}"]
    command += [
        f"--attn-tier={asked.highest}",
        f"--attn-journal={journal}",
        *(f"--attn-item={one}" for one in asked.items),
    ]
    # The caller's project has no say here: no configuration, no conftest, no added options. And the backend is imported
    # from where `draftmark size` imports it: pytest's own import mode would put this package's folder first.
    command += ["-c", str(ini), f"--rootdir={folder}", "--noconftest", "-o", "addopts=", "--import-mode=importlib"]
    # What failed is shown by the suite: one screen, in the order of learning.
    command += ["-q", "-q", "--tb=no", "-rN", "--no-header", "-p", "no:cacheprovider", "--assert=plain"]
    outputs = {"json": asked.json_path, "record": asked.record_path, "html": asked.html_path}
    command += [f"--attn-{kind}={Path(path).absolute()}" for kind, path in outputs.items() if path]
    command += [f"--attn-device={asked.device}"] if asked.device else []
    command += ["--attn-allow-known"] if asked.allow_known else []
    command += [f"--attn-seed={asked.seed}"] if asked.seed is not None else []
    command += [f"--attn-sample={asked.sample}"] if asked.sample else []
    command += ["-k", asked.k] if asked.k else []
    # One item at a time: by default a worker gets dozens in a row, and those that compile kernels lie in a row, so that
    # all wait for one at the end. By the times of a recorded device tier 14 workers take 244 s so, and 176 s with this.
    return command + (["-n", str(asked.workers), "--maxschedchunk=1"] if asked.workers else [])


def _environment(asked: Asked) -> dict[str, str]:
    """Of the processes that run items: as many threads as there are cores for each, unless the caller says.

    On the host tier one, which is also what the suite gives torch: tensors are tiny, and NumPy's threads, with which
    Triton's interpreter multiplies, take several times the processor's time for the same result.
    """
    cores = os.cpu_count() or 1
    threads = max(1, cores // max(1, asked.workers)) if asked.highest is Tier.DEVICE else 1
    return fresh({"PYTEST_ADDOPTS": "", THREADS: os.environ.get(THREADS) or str(threads)})


def _watch(command: list[str], environment: dict[str, str], journal: Path) -> int:
    """Run pytest to its end, or end it when an item makes no progress."""
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
    """End the process when this one is told to end."""

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
