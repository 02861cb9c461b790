"""Writes the table of recorded verdicts in a README: backend, verdict, device and date.

    python -m draftmark_contract.runner.table benchmarks/results/contract-*.json --write README.md

With --write the table replaces the lines between the two marks in the file. Without it the table is printed.
Each verdict links to its record, which has the counts, the profiles and the commit.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- verdicts: written by draftmark_contract.runner.table -->", "<!-- /verdicts -->"
HEADS = ["backend", "verdict", "device", "date"]


def table(records: Iterable[Path], folder: Path) -> str:
    """Return the table as Markdown, one row per record.

    Args:
        records: paths of the record files.
        folder: folder that the links are relative to.

    Raises:
        ValueError: a file cannot be read or is not a record.
    """
    lines = [HEADS, ["---"] * len(HEADS), *(_row(path, folder) for path in records)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(text: str, made: str) -> str:
    """Return a file's text with the table `made` between the two marks in the text.

    Raises:
        ValueError: a mark is missing, or the marks are in the wrong order.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the file has no {BEGIN!r} … {END!r}; add the two lines where the table belongs")
    return f"{before}{BEGIN}\n{made}\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table or write it into a file. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table between the marks of this file")
    args = parser.parse_args(arguments)
    try:
        made = table(sorted(args.records), args.write.parent if args.write else Path())
    except ValueError as error:
        print(f"table: {error}", file=sys.stderr)
        return 1
    if args.write:
        args.write.write_text(written(args.write.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print(made)
    return 0


def _row(path: Path, folder: Path) -> list[str]:
    """Return the table cells of one record."""
    try:
        return _cells(json.loads(path.read_text(encoding="utf-8")), Path(os.path.relpath(path, folder)).as_posix())
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not a verdict record ({cause}); write one with `contract --record`") from None


def _cells(record: dict[str, Any], link: str) -> list[str]:
    runs = record["runs"]
    device = next((run["device"]["name"] for run in runs if run.get("device")), "not recorded")
    dates = sorted({run["date"] for run in runs if run.get("date")})
    verdict = f"[{record['verdict']}]({link}), contract {record['contract']}"
    return [f"`{record['backend']}`", verdict, device, dates[-1] if dates else "–"]


if __name__ == "__main__":
    sys.exit(main())
