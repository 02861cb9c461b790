"""The table of recorded verdicts that a README shows: five counts apart, and what did not run.

    python -m draftmark_contract.runner.table benchmarks/results/contract-*.json --write README.md

Without --write the table is printed. It replaces what stands between the two marks in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- verdicts: written by make verdicts -->", "<!-- /verdicts -->"
COUNTS = ("passed", "refused", "declared", "unjudged", "failed", "not_run")


def table(records: Iterable[tuple[Path, dict[str, Any]]], beside: Path) -> str:
    """Markdown.

    Args:
        records: files and what they hold.
        beside: the folder that links count from.
    """
    heads = ["backend", "verdict", "served in full", *(name.replace("_", " ") for name in COUNTS), "device", "date"]
    rows = [_row(path, record, beside) for path, record in records]
    lines = [heads, ["---", "---", "---", *["---:"] * len(COUNTS), "---", "---"], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(text: str, made: str) -> str:
    """A file's text with the table between its marks.

    Raises:
        ValueError: the marks are not there, once each and in order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the file has no {BEGIN!r} … {END!r}; add the two lines where the table shall stand")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put it between the marks of this file")
    args = parser.parse_args(arguments)
    try:
        made = table([_record(path) for path in sorted(args.records)], args.write.parent if args.write else Path())
    except ValueError as error:
        print(f"table: {error}", file=sys.stderr)
        return 1
    if args.write:
        args.write.write_text(written(args.write.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print(made)
    return 0


def _record(path: Path) -> tuple[Path, dict[str, Any]]:
    """A file and what it holds.

    Raises:
        ValueError: it cannot be read, or is no record.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _row(path, record, path.parent)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no record of a verdict ({cause}); write it with `contract --record`") from None
    return path, record


def _row(path: Path, record: dict[str, Any], beside: Path) -> list[str]:
    runs = record["runs"]
    device = next((_device(run["device"]) for run in runs if run.get("device")), "not recorded")
    dates = sorted({run["date"] for run in runs if run.get("date")})
    link = f"[{record['verdict']}]({Path(os.path.relpath(path, beside)).as_posix()})"
    counts = [f"{record['counts'][name]:,}" for name in COUNTS]
    said = f"{link} {record['contract']}"
    return [f"`{record['backend']}`", said, ", ".join(record["profiles"]), *counts, device, dates[-1] if dates else "–"]


def _device(facts: dict[str, str]) -> str:
    driver = f", driver {facts['driver']}, CUDA {facts['cuda']}" if "driver" in facts else ""
    return f"{facts['name']}{driver}"


if __name__ == "__main__":
    sys.exit(main())
