"""What the command line calls: `draftmark contract` and `draftmark prove`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from draftmark.registry import load

from ..check import Tier
from .journal import ForeignJournal, Journal
from .limits import LIMIT_S
from .session import DEVICE_LOST

Say = Callable[[str], None]
PYTEST_FAILED = (0, 1)
"""Exit codes of a run that came to its end."""
DIED = "the process ended with code {} in this item (a crash, os._exit or a hang)"
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
) -> int:
    """Judge one backend in a process of its own, and print the verdict.

    An item that ends the process (a crash, `os._exit`), costs it the device or hangs in native code fails, and the rest
    still runs.

    Args:
        tier: run up to ``sizing``, ``host`` or ``device``.
        json_path, html_path: where to write the record and the report.
        k: pytest's -k expression; a run of some items gives no verdict.
        device: torch device of the device tier.
        workers: pytest-xdist processes; 0 for none.
        sample: at most so many cases of each check, evenly spread; 0 for all. Fewer than all give no verdict.
        journal_path: keep each item's result in this file; a run with the same file, on another machine too, leaves
            out the items that it has.

    Returns:
        0 when every item of the tiers that ran is met, 2 for wrong arguments, 1 otherwise.
    """
    if tier not in {one.value for one in Tier}:
        print(f"tier is {tier!r}, but it must be sizing, host or device", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(journal_path or Path(folder, "journal.jsonl")).absolute())
        try:
            journal.begin(name)
        except ForeignJournal as error:
            print(error, file=sys.stderr)
            return 2
        command = _command(name, tier, Path(folder), journal.path, device, k, workers, sample)
        for option, path in (("--attn-json", json_path), ("--attn-html", html_path)):
            command += [f"{option}={Path(path).absolute()}"] if path else []
        while True:
            ended = len(journal.ended())
            code = _watch(command, journal.path)
            if code == DEVICE_LOST and len(journal.ended()) > ended:  # or a plugin ended it with that very code
                continue
            if code in PYTEST_FAILED or not journal.fail_unfinished(DIED.format(code)):
                return code if code in (0, 2) else 1


def prove(name: str, say: Say = print) -> int:
    """Prove the sizing of one backend; print each theorem and its status.

    Returns:
        0 when none is refuted or undecided, else 1.
    """
    if importlib.util.find_spec("z3") is None:
        say("proofs need z3-solver: pip install 'draftmark-contract[proof]'")
        return 1
    from ..backend_under_test import BackendUnderTest
    from ..proof.prover import prove_all
    from ..proof.table import proof_table

    start = time.monotonic()
    proofs = prove_all(BackendUnderTest(load(name), "cpu", Tier.SIZING))
    say(proof_table(name, proofs))
    say(f"{time.monotonic() - start:.1f} s")
    return int(any(proof.fails for proof in proofs))


def _command(
    name: str, tier: str, folder: Path, journal: Path, device: str | None, k: str | None, workers: int, sample: int
) -> list[str]:
    ini = folder / "pytest.ini"
    ini.write_text("[pytest]\n", encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "--pyargs", "draftmark_contract", f"--attn-backend={name}"]
    command += [f"--attn-tier={tier}", f"--attn-journal={journal}", "-q", "--no-header", "-p", "no:cacheprovider"]
    # The caller's project has no say here: no configuration, no conftest, no added options.
    command += ["-c", str(ini), f"--rootdir={folder}", "--noconftest", "-o", "addopts="]
    command += [f"--attn-device={device}"] if device else []
    command += ["-k", k] if k else []
    command += [f"--attn-sample={sample}"] if sample else []
    return command + (["-n", str(workers)] if workers else [])


def _watch(command: list[str], journal: Path) -> int:
    """Run pytest to its end, or end it when an item makes no progress."""
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    with subprocess.Popen(command, env=environment) as process:
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
