"""What has been decided so far, one JSON line each, so that a run that was cut goes on."""

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
    """The files of one target in a folder: what was decided, and the baseline."""

    folder: Path
    target: str

    @property
    def path(self) -> Path:
        """Results, and what they speak of."""
        return self.folder / f"{self.target}.jsonl"

    @property
    def baseline(self) -> Path:
        """See `baseline.measure`."""
        return self.folder / f"{self.target}.baseline.json"

    def begin(self, identity: dict[str, str]) -> None:
        """Go on with what was decided of the same sources by the same suite; forget all else, but not what kills."""
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
        """Append one line."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def ended(self) -> dict[str, Ended]:
        """How each mutant ended, by its id."""
        return {row["mutation"]: Ended.from_json(row) for row in self._rows() if "mutation" in row}

    def kills(self) -> Counter[str]:
        """How many mutants each item has killed, those of earlier suites and sources too."""
        found: Counter[str] = Counter()
        for row in self._rows():
            found.update(row.get("kills", {}))
            if row.get("item"):
                found[row["item"]] += 1
        return found

    def killers(self) -> dict[str, str]:
        """The item that killed each mutant, under an earlier suite too: it is likely to do so again."""
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
                except json.JSONDecodeError:  # the process was ended while it wrote
                    continue


def identity(target: Target, some: Collection[str] = ()) -> dict[str, str]:
    """Digests of what a result depends on: the mutated package, the core, the suite, and which items, if not all."""
    roots = {"package": target.folder, "core": Path(draftmark.__file__).parent}
    roots["suite"] = Path(draftmark_contract.__file__).parent
    found = {name: _digest(root) for name, root in roots.items()}
    return {**found, "items": _short("\n".join(sorted(some)).encode())} if some else found


def _digest(folder: Path) -> str:
    files = sorted(folder.rglob("*.py"))
    return _short(b"".join(f"{file.relative_to(folder)}\0".encode() + file.read_bytes() for file in files))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
