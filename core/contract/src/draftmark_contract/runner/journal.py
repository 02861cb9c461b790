"""What a run has decided so far, one JSON line each: so that a run which was cut, or moved to the device, goes on.

Lines are ``{"journal": …}`` (what it speaks of; the first), ``{"run": …}`` (where the lines behind it were decided),
``{"started": item}``, and results of items. Several processes append to one file.
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from pathlib import Path
from typing import Any

from draftmark.registry import Available, entry
from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR

from .item import Outcome, Result, all_items
from .known import hash_of


class ForeignJournal(ValueError):
    """The file speaks of other code than what is installed."""


@dataclass(frozen=True)
class Judged:
    """What a result depends on, and what a journal must agree with: the backend's files, and the suite."""

    backend: str
    files_sha256: str
    contract: str
    items: int

    @classmethod
    def now(cls, name: str) -> Judged:
        """As installed. Imports no backend."""
        return cls(name, hash_of(_folder(entry(name))), f"{CONTRACT_MAJOR}.{CONTRACT_MINOR}", len(all_items()))


@dataclass(frozen=True)
class Journal:
    """A journal file, which need not exist yet."""

    path: Path

    def begin(self, name: str) -> None:
        """Start a run of backend `name`.

        Raises:
            ForeignJournal: the file has results of another backend, of other files of it, or of another suite.
        """
        now = asdict(Judged.now(name))
        was = next((row["journal"] for row in self._rows() if "journal" in row), None)
        if was is None:
            self.note({"journal": now})
        elif was != now:
            told = "; ".join(
                f"{key} is {was.get(key)!r}, now {value!r}" for key, value in now.items() if was.get(key) != value
            )
            raise ForeignJournal(f"{self.path}: {told}; name a new file, or bring back what this one speaks of")
        self.note({"run": here(name)})

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

    def fail_unfinished(self, message: str) -> bool:
        """Note the item under way in the latest run as failed, and say whether there was one."""
        under_way: dict[str, None] = {}
        for row in self._rows():
            if "run" in row:
                under_way = {}
            elif "started" in row:
                under_way[row["started"]] = None
            elif "item" in row:
                under_way.pop(row["item"], None)
        item = next(iter(under_way), None)
        if item is None:
            return False
        tier = next((one.tier.value for one in all_items() if one.id == item), "sizing")
        self.note(Result(item, tier, Outcome.FAILED, message).as_json())
        return True

    def _rows(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # the process was ended while it wrote
                continue


def here(name: str) -> dict[str, Any]:
    """Python, machine, and versions of the backend's own distribution and of what it asks for, as installed."""
    row = entry(name)
    versions = {}
    for package in ("draftmark", "torch", row.distribution if row else "", *_required(row)):
        try:
            versions[package] = metadata.version(package)
        except (metadata.PackageNotFoundError, ValueError):
            continue
    return {"python": platform.python_version(), "machine": platform.machine(), "versions": versions}


def _folder(row: Available | None) -> Path | None:
    """Where the backend's module lies, found without running any of its code."""
    top, *rest = row.module.partition(":")[0].split(".") if row else [""]
    spec = util.find_spec(top) if top else None
    if spec is None or spec.origin is None:
        return None
    found = Path(spec.origin).parent.joinpath(*rest)
    return found if found.is_dir() else found.parent


def _required(row: Available | None) -> list[str]:
    try:
        asked = metadata.requires(row.distribution) or [] if row else []
    except metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^A-Za-z0-9._-]", line.strip())[0] for line in asked]
