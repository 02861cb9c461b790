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


def table(records: Iterable[Path], beside: Path) -> str:
    """Markdown.

    Args:
        records: their files.
        beside: the folder that links count from.

    Raises:
        ValueError: a file cannot be read, or is no record.
    """
    heads = ["backend", "verdict", "served in full", *(name.replace("_", " ") for name in COUNTS), "device", "date"]
    rows = [_row(path, beside) for path in records]
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
        made = table(sorted(args.records), args.write.parent if args.write else Path())
    except ValueError as error:
        print(f"table: {error}", file=sys.stderr)
        return 1
    if args.write:
        args.write.write_text(written(args.write.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        print(made)
    return 0


def _row(path: Path, beside: Path) -> list[str]:
    """The cells of a record, or a ValueError."""
    try:
        return _cells(json.loads(path.read_text(encoding="utf-8")), Path(os.path.relpath(path, beside)).as_posix())
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is no record of a verdict ({cause}); write it with `contract --record`") from None


def _cells(record: dict[str, Any], link: str) -> list[str]:
    runs = record["runs"]
    device = next((_device(run["device"]) for run in runs if run.get("device")), "not recorded")
    dates = sorted({run["date"] for run in runs if run.get("date")})
    counts = [f"{record['counts'][name]:,}" for name in COUNTS]
    said = f"[{record['verdict']}]({link}) {record['contract']}"
    return [f"`{record['backend']}`", said, ", ".join(record["profiles"]), *counts, device, dates[-1] if dates else "–"]


def _device(facts: dict[str, str]) -> str:
    driver = f", driver {facts['driver']}, CUDA {facts['cuda']}" if "driver" in facts else ""
    return f"{facts['name']}{driver}"


if __name__ == "__main__":
    sys.exit(main())
