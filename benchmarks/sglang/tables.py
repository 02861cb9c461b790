"""The record of a run, and from it the tables of docs/sglang.md.

python -m benchmarks.sglang.tables                                  # write the tables into the page
python -m benchmarks.sglang.tables --of ROWS.json TEXTS.json ABOUT.json   # make the record of a run's files
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "sglang-h200.json"
PAGE = ROOT / "docs" / "sglang.md"
BEGIN, END = "<!-- from benchmarks/results/sglang-h200.json -->", "<!-- end -->"
OURS = "draftmark"
NAMES = {"fa3": "FA3", "flashinfer": "FlashInfer", "triton": "Triton"}
HEADINGS = {"none": "plain", "chain": "a chain of 3 drafts", "tree": "a tree of topk, steps, nodes"}

HEAD = "| requests × prompt | draftmark | SGLang's best | ratio | others |\n|---|---:|---:|---:|---|\n"

Row = dict[str, Any]


def record_of(rows: Row, texts: list[Row], about: Row) -> Row:
    """One run's files as they are recorded: profiles apart, and of what was not measured only the names."""
    profiles = [
        dict(case=row["case"], backend=row["backend"], page_size=row["page_size"]) | row["profile"]
        for row in rows["rows"]
        if "profile" in row
    ]
    return about | dict(
        device=rows["device"],
        versions=dict(torch=rows["torch"], sglang=rows["sglang"]),
        equality=[{name: value for name, value in text.items() if name != "log"} for text in texts],
        rows=[{name: value for name, value in row.items() if name != "profile"} for row in rows["rows"]],
        profiles=profiles,
        not_measured=[*rows["not_measured"], *about.get("not_measured", [])],
    )


def write_record(record: Row, out: Path) -> None:
    """One line for a row: a record is read by people too."""
    parts = []
    for name, value in record.items():
        if isinstance(value, list) and value:
            inner = ",\n  ".join(json.dumps(one) for one in value)
            parts.append(f" {json.dumps(name)}: [\n  {inner}\n ]")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    out.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def compared(rows: Iterable[Row]) -> list[tuple[Row, Row, list[Row]]]:
    """Of each case and phase draftmark's fastest row, the fastest of SGLang's own backends, and all others.

    A point that was measured twice counts with the better of both, whoever it is.
    """
    found = []
    for _, group in _by(rows, "phase", "case"):
        best: dict[tuple[str, int], Row] = {}
        for row in group:
            key = row["backend"], row["page_size"]
            if key not in best or row["tokens_per_s"] > best[key]["tokens_per_s"]:
                best[key] = row
        ordered = sorted(best.values(), key=lambda row: -row["tokens_per_s"])
        ours = next(row for row in ordered if row["backend"] == OURS)
        peer = next(row for row in ordered if row["backend"] != OURS)
        found.append((ours, peer, [row for row in ordered if row is not ours and row is not peer]))
    return found


def _by(rows: Iterable[Row], *names: str) -> list[tuple[Any, list[Row]]]:
    """Rows by fields, in the order in which these first come."""
    listed = list(rows)
    order = list(dict.fromkeys(tuple(row[name] for name in names) for row in listed))
    ordered = sorted(listed, key=lambda row: order.index(tuple(row[name] for name in names)))
    return [(key, list(group)) for key, group in groupby(ordered, lambda row: tuple(row[name] for name in names))]


def tables(record: Row) -> str:
    """All rows: a table for each way to speculate, and one of prefill."""
    parts = []
    for (of,), rows in _by([row | dict(of=_of(row)) for row in record["rows"]], "of"):
        parts.append(f"**{of}**\n\n{HEAD}")
        for ours, peer, others in compared(rows):
            ratio = ours["tokens_per_s"] / peer["tokens_per_s"]
            rest = ", ".join(_called(one) for one in others)
            point = f"{ours['num_reqs']} × {ours['prompt_len'] // 1024}k"
            parts.append(f"| {point} | {_called(ours, False)} | {_called(peer)} | {ratio:.2f} | {rest} |\n")
        parts.append("\n")
    return "".join(parts)


def _of(row: Row) -> str:
    """The heading that a row stands under."""
    if row["phase"] == "prefill":
        return "prefill"
    shape = row["case"].split()[0].removeprefix(row["speculate"]).strip("()").replace(",", ", ")
    return HEADINGS[row["speculate"]] + (f" ({shape})" if shape else "")


def _called(row: Row, named: bool = True) -> str:
    backend: str = row["backend"]
    name = NAMES.get(backend, backend) + " " if named else ""
    return f"{name}{row['tokens_per_s']:,.0f} (p{row['page_size']})"


def page(text: str, record: Row) -> str:
    """The page with its tables made anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(record)}{END}{rest.split(END)[1]}"


def main() -> None:
    """Make the record, if asked, and write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang.tables")
    parser.add_argument("--of", nargs=3, type=Path, metavar=("ROWS", "TEXTS", "ABOUT"))
    options = parser.parse_args()
    if options.of:
        write_record(record_of(*(json.loads(one.read_text()) for one in options.of)), RECORD)
    PAGE.write_text(page(PAGE.read_text(), json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
