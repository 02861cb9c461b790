"""Journal of a run: one JSON line per event. An interrupted run resumes from it, also on another machine.

The first line is ``{"journal": …}`` and describes the tested code. Further lines are ``{"run": …}`` (machine of the
lines that follow) and results of items. Only the parent process of a run writes the file, which is locked against
other runs.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from draftmark_tools.cli.errors import ArgumentError

from .outcome import Result
from .source import CLEAN
from .stopped import RunStopped

try:
    import fcntl
except ImportError:  # Windows has no fcntl, so a journal is not locked there.
    fcntl = None  # type: ignore[assignment]

NO_JOURNAL = "{} is no journal of a contract run, or it is damaged; name a new file"


class JournalError(ArgumentError):
    """The journal cannot be used; the message has the remedy."""


class ForeignJournal(JournalError):
    """The file is not a journal, or it is the journal of a run on other code than the installed code."""


class JournalInUse(JournalError):
    """Another run is writing to the journal."""


@dataclass(frozen=True)
class Journal:
    """Reads and appends to a journal file, which need not exist yet."""

    path: Path

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the file against other runs. The system releases the lock however this process ends.

        The lock is on the journal itself, so no lock file remains.

        Raises:
            JournalInUse: another run holds the lock.
        """
        with self.path.open("ab") as file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                remedy = "wait until that run ends, or name another file"
                raise JournalInUse(f"another run writes to the journal {self.path}; {remedy}") from None
            yield

    def begin(self, judged: dict[str, Any], run: dict[str, Any]) -> None:
        """Write the lines that start a run.

        Args:
            judged: code that results depend on: the name ``backend``, and ``identity``, see `identity.identity_of`.
            run: machine and date, see `machine`, and ``source`` of the code.

        Raises:
            ForeignJournal: the file belongs to another backend, or to other code of the backend or suite.
        """
        try:
            was = self.judged
            self.ended(), self.source()
        except (AttributeError, KeyError, TypeError, ValueError):  # The line is not JSON, or it has no journal's keys.
            raise ForeignJournal(NO_JOURNAL.format(self.path)) from None
        if not was:
            if self.path.is_file() and self.path.stat().st_size:
                raise ForeignJournal(NO_JOURNAL.format(self.path))
            self.note({"journal": judged})
        elif was != judged:
            changes = "; ".join(_differences(was, judged))
            raise ForeignJournal(
                f"{self.path}: {changes}; name a new file, or restore the code that this file belongs to"
            )
        self.note({"run": run})

    @property
    def judged(self) -> dict[str, Any]:
        """Identity of the code that the file's results depend on; {} before `begin`."""
        return next((dict(row["journal"]) for row in self._rows() if "journal" in row), {})

    def note(self, row: dict[str, Any]) -> None:
        """Append one line, after a line break if an earlier write was cut short.

        Raises:
            RunStopped: the line cannot be written whole, e.g. because the disk is full.
        """
        try:
            with self.path.open("a+b", buffering=0) as file:
                data = (b"\n" if _torn(file) else b"") + json.dumps(row).encode() + b"\n"
                while data:  # On a full disk the first write is only partial, and the next write raises the error.
                    data = data[file.write(data) :]
        except OSError as error:
            remedy = "free space there, then run the command again"
            raise RunStopped(f"the journal {self.path} cannot be written ({error.strerror}); {remedy}") from error

    def ended(self) -> dict[str, Result]:
        """Return the result of each ended item, by item."""
        return {row["item"]: Result.from_json(row) for row in self._rows() if "item" in row}

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs that gave the latest result of at least one item, each with the number of its items."""
        last: dict[str, int] = {}
        runs: list[dict[str, Any]] = []
        for row in self._rows():
            if "run" in row:
                runs.append(row["run"])
            elif "item" in row:
                last[row["item"]] = len(runs) - 1
        counts = Counter(last.values())
        return [{**run, "items": counts[index]} for index, run in enumerate(runs) if counts[index]]

    def source(self) -> dict[str, Any] | None:
        """Return the source of a run with a verified clean tree, or None. All runs of a journal share one code."""
        sources = (run.get("source") or {} for run in self.runs())
        return next((source for source in sources if source.get("tree") == CLEAN), None)

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # The process ended while it wrote this line.
                continue
            if isinstance(row, dict):
                yield row


def _torn(file: BinaryIO) -> bool:
    """Return True if the file's last line has no line break. This moves the file position to the end."""
    if not file.seek(0, os.SEEK_END):
        return False
    file.seek(-1, os.SEEK_END)
    return file.read(1) != b"\n"


def _differences(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between the journal's code and the installed code, part by part."""
    if was.get("backend") != now["backend"]:
        yield f"backend is {was.get('backend')!r}, now {now['backend']!r}"
    recorded = was.get("identity")
    then = recorded if isinstance(recorded, dict) else {}
    for part in sorted(then.keys() | now["identity"].keys()):
        if then.get(part) != now["identity"].get(part):
            yield f"the code of {part!r} has changed"
