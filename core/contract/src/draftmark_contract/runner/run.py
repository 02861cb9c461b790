"""Runs `draftmark contract`: starts child processes, keeps the journal, and returns the exit code."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from .child import PARSED, ChildEnd, run_child
from .failures import verdict_lines
from .journal import Journal, JournalError
from .judging import judge
from .options import RunOptions, WrongArguments
from .probe import probe
from .session import DEVICE_LOST
from .stopped import INTERRUPTED, WITHOUT_VERDICT, RunStopped, killed_from_outside

NO_ITEMS = 5
"""pytest's exit code if no item was selected."""
DIED = "the process ended with code {} in this item (a crash, os._exit or a hang)"


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
    stop_at_first: bool = False,
) -> int:
    """Judge one backend in a child process and print the verdict. See `RunOptions` for the arguments.

    An item fails if it ends its process (a crash, `os._exit`), destroys the device context or hangs in native code. The
    other items still run. A run that cannot go on for another reason prints why it gives no verdict, and writes no file
    except the journal.

    Returns:
        0 if the backend conforms, or if nothing failed in a selection of items; 1 if it does not conform; 2 without a
        verdict: wrong arguments, a backend that does not load, an interrupted run, a full disk.
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
        stop_at_first,
    )
    try:
        options.check()
        with _sigterm_as_ctrl_c():
            return _judge(options)
    except (WrongArguments, JournalError) as error:
        print(f"draftmark contract: {error}", file=sys.stderr)
        return WITHOUT_VERDICT
    except RunStopped as stopped:
        return _no_verdict(options, str(stopped))
    except KeyboardInterrupt:
        return _no_verdict(options, INTERRUPTED)
    # The reader of the pipe ended, as in `draftmark contract … | head`. The command line handles the error.
    except BrokenPipeError:
        raise
    except OSError as error:
        return _no_verdict(options, f"{error.filename or 'the output'} cannot be written ({error.strerror})")


def _judge(options: RunOptions) -> int:
    begin = probe(options.name, options.highest, options.device or "")
    if "unusable" in begin:
        raise WrongArguments(f"the device tier cannot run here: {begin['unusable']}")
    if "error" in begin:
        return _no_verdict(options, f"it does not load: {begin['error']}")
    if not begin["states"]:
        options.check_stateless()
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(options.journal_path or Path(folder, "journal.jsonl")).absolute())
        with journal.locked():
            journal.begin(begin["judged"], begin["run"])
            _pass_on(begin["parsed"], Path(folder, PARSED))
            return _run(options, journal, Path(folder))


def _pass_on(parsed: dict[str, str], file: Path) -> None:
    """Write the digests of parsed files for the child. If the disk is full, the child parses the files again."""
    try:
        file.write_text(json.dumps(parsed), encoding="utf-8")
    except OSError:
        file.unlink(missing_ok=True)


def _run(options: RunOptions, journal: Journal, folder: Path) -> int:
    """Run all items until there is a verdict. Start a new process whenever an item ends the current one."""
    while True:
        done = len(journal.ended())
        end = run_child(options, folder, journal)
        if end.verdict is not None:
            return end.verdict
        item = journal.under_way()
        if end.code == NO_ITEMS and not item:
            raise WrongArguments(f"-k {options.k!r} selects no item")
        progressed = len(journal.ended()) > done
        # A process that ended no item did not lose the device: the plugin itself exited with the same code.
        if end.code == DEVICE_LOST and progressed:
            continue
        if reason := _not_the_backends(end, options, item):
            return _no_verdict(options, reason, journal)
        journal.fail(item, DIED.format(end.code))


def _not_the_backends(end: ChildEnd, options: RunOptions, item: str) -> str:
    """Return why the child ended, as a clause for the verdict line; "" if the item that it ran is the cause."""
    if end.interrupted:
        return INTERRUPTED
    if end.stalled and item:
        return ""
    if reason := killed_from_outside(end.code, item):
        return reason
    if options.workers:  # With pytest-xdist a crashing item ends only its worker, so no item ended this process.
        return f"the process that distributes the items ended with code {end.code}"
    return "" if item else f"the run ended with code {end.code} outside of any item"


def _no_verdict(options: RunOptions, reason: str, journal: Journal | None = None) -> int:
    """Print that there is no verdict and why. Return the exit code."""
    results = list(journal.ended().values()) if journal else []
    print("\n".join(verdict_lines(judge(options.name, None, results, reason))))
    return WITHOUT_VERDICT


@contextmanager
def _sigterm_as_ctrl_c() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that the child ends too and prints that there is no verdict."""
    try:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    except ValueError:  # Only the main thread may set a signal handler.
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
