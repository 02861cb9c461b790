"""The journal: one JSON line per finished mutant, so that an interrupted run continues."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draftmark
import draftmark_contract

from .judge import Ended
from .targets import Target


@dataclass(frozen=True)
class Journal:
    """Reads and writes the results file of one target, and gives the path of its baseline file."""

    folder: Path
    target: str

    @property
    def path(self) -> Path:
        """Path of the results: one identity line, the kills of earlier runs, then one line per mutant."""
        return self.folder / f"{self.target}.jsonl"

    @property
    def baseline(self) -> Path:
        """Path of the file that `baseline.measure` writes."""
        return self.folder / f"{self.target}.baseline.json"

    def begin(self, identity: dict[str, str]) -> None:
        """Keep the journal's results if its sources and suite equal `identity`; else keep only the numbers of kills."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = list(self._rows())
        if rows and rows[0].get("identity") == identity:
            return
        kills, killers = self.kills(), self.killers()
        self.baseline.unlink(missing_ok=True)
        self.path.write_text("")
        self.note({"identity": identity})
        self.note({"kills": dict(kills), "killers": killers})

    def note(self, row: dict[str, Any]) -> None:
        """Append one row to the results file, as a line of JSON."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def ended(self) -> dict[str, Ended]:
        """Return the last result of each mutant, by its id."""
        return {row["mutation"]: Ended.from_json(row) for row in self._rows() if "mutation" in row}

    def kills(self) -> Counter[str]:
        """Return the number of mutants that each item killed, under earlier suites and sources too."""
        found: Counter[str] = Counter()
        for row in self._rows():
            found.update(row.get("kills", {}))
            if row.get("item"):
                found[row["item"]] += 1
        return found

    def killers(self) -> dict[str, str]:
        """Return the last item that killed each mutant, also under an earlier suite: it is likely to kill again."""
        found: dict[str, str] = {}
        for row in self._rows():
            found.update(row.get("killers", {}))
            if row.get("item"):
                found[row["mutation"]] = row["item"]
        return found

    def _rows(self) -> Iterator[dict[str, Any]]:
        if self.path.is_file():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:  # the process ended while it wrote this line
                    continue


def identity(target: Target, some: Collection[str] = ()) -> dict[str, str]:
    """Return digests of the mutated package, the core and the suite, and of `some`, the items used, if not all."""
    roots = {"package": target.folder, "core": Path(draftmark.__file__).parent}
    roots["suite"] = Path(draftmark_contract.__file__).parent
    found = {name: _digest(root) for name, root in roots.items()}
    return {**found, "items": _short("\n".join(sorted(some)).encode())} if some else found


def _digest(folder: Path) -> str:
    files = sorted(folder.rglob("*.py"))
    return _short(b"".join(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() for file in files))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
