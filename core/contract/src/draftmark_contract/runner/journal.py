"""Journal of a run: one JSON line per event, so that an interrupted run can resume, also on another machine.

The first line is ``{"journal": …}`` and describes the judged code. Further lines are ``{"run": …}`` (machine of the
lines that follow), ``{"started": item}``, and results of items. Several processes append to one file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .explanation import again
from .item import all_items
from .outcome import Outcome, Result
from .source import CLEAN

NO_JOURNAL = "{} is no journal of a contract run, or it is damaged; name a new file"


class ForeignJournal(ValueError):
    """The file belongs to other code than the installed one, or is no journal."""


@dataclass(frozen=True)
class Journal:
    """A journal file; it need not exist yet."""

    path: Path

    def begin(self, judged: dict[str, Any], run: dict[str, Any]) -> None:
        """Start a run.

        Args:
            judged: code that results depend on: the name ``backend``, and ``identity``, see `identity.identity_of`.
            run: machine and date, see `machine`, and ``source`` of the code.

        Raises:
            ForeignJournal: the file belongs to another backend, or to other code of the backend or suite.
        """
        try:
            was = self.judged
            self.ended(), self.source()
        except (AttributeError, KeyError, TypeError, ValueError):  # valid JSON of another kind, or no JSON
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
        """Code that the file's results depend on; empty before `begin`."""
        return next((dict(row["journal"]) for row in self._rows() if "journal" in row), {})

    def note(self, row: dict[str, Any]) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def ended(self) -> dict[str, Result]:
        """Return results by item."""
        return {row["item"]: Result.from_json(row) for row in self._rows() if "item" in row}

    def runs(self) -> list[dict[str, Any]]:
        """Return the runs with results that count, each with the number of these results."""
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

    def fail_unfinished(self, message: str) -> bool:
        """Record the latest run's unfinished item as failed; return False if there is none."""
        under_way: dict[str, None] = {}
        backend = "NAME"
        for row in self._rows():
            if "journal" in row:
                backend = row["journal"]["backend"]
            elif "run" in row:
                under_way = {}
            elif "started" in row:
                under_way[row["started"]] = None
            elif "item" in row:
                under_way.pop(row["item"], None)
        item = next(iter(under_way), None)
        if item is None:
            return False
        tier = next((one.tier.value for one in all_items() if one.id == item), "sizing")
        self.note(Result(item, tier, Outcome.FAILED, f"{message}\n{again(backend, item)}").as_json())
        return True

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # the process ended during the write
                continue
            if isinstance(row, dict):
                yield row


def _differences(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yield differences between the journal's code and the installed code, by part."""
    if was.get("backend") != now["backend"]:
        yield f"backend is {was.get('backend')!r}, now {now['backend']!r}"
    recorded = was.get("identity")
    then = recorded if isinstance(recorded, dict) else {}
    for part in sorted(then.keys() | now["identity"].keys()):
        if then.get(part) != now["identity"].get(part):
            yield f"the code of {part!r} has changed"
