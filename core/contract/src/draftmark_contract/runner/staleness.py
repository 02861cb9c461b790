"""Checks whether recorded verdicts still apply to the installed code, so that a release may include them.

    python -m draftmark_contract.runner.staleness benchmarks/results/contract-*.json [--strict]

Prints one line per record. With --strict, exits with 1 unless each backend has a current record. Records of further
devices may be older, because a device is not always at hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftmark import load
from draftmark.errors import DraftmarkError
from draftmark.loaded import LoadedBackend

from .identity import CORE, GUARD, PLUGIN, PROOF, SUITE, parts_of
from .record import SCHEMA
from .source import verified
from .verdict import Scope, Word

NAMES = {
    PLUGIN: "the plugin's code",
    CORE: "the core's step path",
    GUARD: "guard mode",
    SUITE: "the suite",
    PROOF: "the proofs",
}


def stale(record: dict[str, Any], backend: LoadedBackend, repository: Path) -> list[str]:
    """Return reasons why a recorded verdict does not apply to this backend; an empty list if it does.

    Args:
        record: short or full record.
        backend: installed backend.
        repository: a folder in a git repository with the recorded commit in its history.
    """
    if record.get("schema") != SCHEMA:
        return [f"it has schema {record.get('schema')}, not {SCHEMA}"]
    parts = parts_of(backend)
    now, then = {part.name: part.digest() for part in parts}, record["identity"]
    changed = [NAMES.get(name, f"{name}'s code, which it runs,") for name in now if now[name] != then.get(name)]
    claims = {
        f"its backend is {record['backend']!r}": record["backend"] == backend.name,
        f"its verdict is {record['verdict']!r} of {record['of']!r}": (
            record["verdict"] in (Word.CONFORMS, Word.WITH_KNOWN) and record["of"] == Scope.BACKEND
        ),
        f"tiers run: {', '.join(record['tiers_run'])}": record["tiers_run"] == list(record["items"]),
        "it lists no device": any(run.get("device") for run in record["runs"]),
        **{f"{what} has changed since": False for what in changed},
        f"no history here shows that commit {record['source'].get('commit') or 'none'} contains the recorded code": (
            verified(record, parts, repository)
        ),
    }
    return [reason for reason, holds in claims.items() if not holds]


def standing(path: Path) -> list[str]:
    """Return reasons why the record in a file does not apply. A file that cannot be read is such a reason."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return stale(record, load(record["backend"]), path.parent)
    except (AttributeError, DraftmarkError, KeyError, OSError, TypeError, ValueError) as error:
        return [f"it cannot be read: {type(error).__name__}: {error}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print for each record whether it is current, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--strict", action="store_true", help="exit with 1 unless each backend has a current one")
    args = parser.parse_args(arguments)
    found = {path: standing(path) for path in args.records}
    for path, reasons in found.items():
        print(f"{path}: {'stale: ' + '; '.join(reasons) if reasons else 'current'}")
    current = {_backend(path) for path, reasons in found.items() if not reasons}
    return int(args.strict and any(_backend(path) not in current for path in found))


def _backend(path: Path) -> str:
    """Return the backend that a file's record names, or the file's path if it has no such name."""
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["backend"])
    except (KeyError, OSError, TypeError, ValueError):
        return str(path)


if __name__ == "__main__":
    sys.exit(main())
