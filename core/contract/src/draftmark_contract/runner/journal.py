"""What a run has decided so far, one JSON line each: so that a run which was cut, or moved to the device, goes on.

Lines are ``{"journal": …}`` (what it speaks of; the first), ``{"run": …}`` (where the lines behind it were decided),
``{"started": item}``, and results of items. Several processes append to one file.
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
    """The file speaks of other code than what is installed, or is no journal."""


@dataclass(frozen=True)
class Journal:
    """A journal file, which need not exist yet."""

    path: Path

    def begin(self, judged: dict[str, Any], run: dict[str, Any]) -> None:
        """Start a run.

        Args:
            judged: what results depend on: ``backend``, its name, and ``identity``, see `identity.identity_of`.
            run: where and when, see `machine`, and the ``source`` of the code.

        Raises:
            ForeignJournal: the file has results of another backend, of other code of it, or of another suite.
        """
        try:
            was = self.judged
            self.ended(), self.source()
        except (AttributeError, KeyError, TypeError, ValueError):  # JSON, of something else
            raise ForeignJournal(NO_JOURNAL.format(self.path)) from None
        if not was:
            if self.path.is_file() and self.path.stat().st_size:
                raise ForeignJournal(NO_JOURNAL.format(self.path))
            self.note({"journal": judged})
        elif was != judged:
            told = "; ".join(_differences(was, judged))
            raise ForeignJournal(f"{self.path}: {told}; name a new file, or bring back what this one speaks of")
        self.note({"run": run})

    @property
    def judged(self) -> dict[str, Any]:
        """What the file's results depend on; empty for a file that is not begun."""
        return next((dict(row["journal"]) for row in self._rows() if "journal" in row), {})

    def note(self, row: dict[str, Any]) -> None:
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def ended(self) -> dict[str, Result]:
        """Results by item."""
        return {row["item"]: Result.from_json(row) for row in self._rows() if "item" in row}

    def runs(self) -> list[dict[str, Any]]:
        """Where items were decided, and how many of those that count."""
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
        """The source of a run that proved its tree clean: all runs of one journal are of the same code."""
        sources = (run.get("source") or {} for run in self.runs())
        return next((source for source in sources if source.get("tree") == CLEAN), None)

    def fail_unfinished(self, message: str) -> bool:
        """Note the item under way in the latest run as failed, and say whether there was one."""
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
            except json.JSONDecodeError:  # the process was ended while it wrote
                continue
            if isinstance(row, dict):
                yield row


def _differences(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What the journal speaks of beside what is installed; digests by part."""
    if was.get("backend") != now["backend"]:
        yield f"backend is {was.get('backend')!r}, now {now['backend']!r}"
    told = was.get("identity")
    then = told if isinstance(told, dict) else {}
    for part in sorted(then.keys() | now["identity"].keys()):
        if then.get(part) != now["identity"].get(part):
            yield f"the code of {part!r} is other than it was"
