"""The SGLang record: a run's files become part of it, and tables are made from it.

    python -m benchmarks.sglang.tables                  # write the summary between the marks of docs/sglang.md
    python -m benchmarks.sglang.tables --run NAME ROWS.json ABOUT.json [TEXTS.json]  # add a run first

A record holds the rows of several runs, each with the name of its run. Rows of two runs are never compared: they were
measured on different machines or at different hours.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import runs

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "sglang-h200.json"
PAGE = ROOT / "docs" / "sglang.md"
BEGIN, END = "<!-- summary: written by benchmarks.sglang.tables -->", "<!-- /summary -->"
OURS = "draftmark"
STUCK_OUT = 1.4
"""A longest round of more than this multiple of the median is left out of the rate: a backend compiled then."""
NAMES = {"fa3": "FA3", "flashinfer": "FlashInfer", "triton": "Triton"}
HEADINGS = {
    "none": "plain",
    "chain": "chain of 3 drafts",
    "tree": "tree",
    "ngram": "n-gram tree",
}
"""Names of drafts. In brackets follow topk, steps and nodes of a tree, or the nodes of an n-gram tree."""

HEAD = "| requests × prompt | draftmark | SGLang's fastest | ratio | bound | others |\n|---|---:|---:|---:|---:|---|\n"
SUMMARY = (
    "| speculation | page size | compared with | points | lowest | median | highest |\n"
    "|---|---:|---|---:|---:|---:|---:|\n"
)
ROUNDS = "| case | backend | round | busy | only attention | all else | idle |\n|---|---|---:|---:|---:|---:|---:|\n"
TEXTS = "| backend | case | texts equal to plain decoding's | others, different at a near tie |\n|---|---|---:|---:|\n"

Row = dict[str, Any]


def with_run(record: Row, name: str, rows: Row, about: Row, texts: Iterable[Row] = ()) -> Row:
    """Return the record with a run's files in it; a run of the same name is replaced.

    Profiles become a list of their own. Cases that were not measured are kept by name only.
    """
    profiles = [
        dict(case=row["case"], backend=row["backend"], page_size=row["page_size"]) | row["profile"]
        for row in rows["rows"]
        if "profile" in row
    ]
    made = about | dict(
        device=rows["device"],
        versions=dict(torch=rows["torch"], sglang=rows["sglang"]),
        not_measured=[*rows["not_measured"], *about.get("not_measured", [])],
    )
    found = {
        "equality": [{field: value for field, value in text.items() if field != "log"} for text in texts],
        "rows": [{field: value for field, value in row.items() if field != "profile"} for row in rows["rows"]],
        "profiles": profiles,
    }
    lists = {part: runs.with_run(record.get(part, []), name, new) for part, new in found.items()}
    return record | dict(schema=2, runs=record.get("runs", {}) | {name: made}) | lists


def write_record(record: Row, out: Path) -> None:
    """Write a record with one line per row."""
    parts = []
    for name, value in record.items():
        if isinstance(value, list) and value:
            inner = ",\n  ".join(json.dumps(one) for one in value)
            parts.append(f" {json.dumps(name)}: [\n  {inner}\n ]")
        elif name == "runs":
            inner = ",\n  ".join(f"{json.dumps(run)}: {json.dumps(about)}" for run, about in value.items())
            parts.append(f" {json.dumps(name)}: {{\n  {inner}\n }}")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    out.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def rate(row: Row) -> float:
    """Return a row's tokens/s. If its longest round exceeds `STUCK_OUT` times the median, use the median round."""
    median = row.get("median_round_us", 0.0)
    if row.get("longest_round_us", 0.0) <= STUCK_OUT * median:
        return float(row["tokens_per_s"])
    return float(row["num_reqs"] * row["accept_len"] * 1e6 / median)


def compared(rows: Iterable[Row]) -> list[tuple[Row | None, Row | None, list[Row]]]:
    """Return draftmark's fastest row, the fastest of SGLang's own backends, and all others, for each case and phase.

    A point that was measured twice counts with its faster measurement, for every backend. None: nothing was measured.
    """
    found = []
    for _, group in _by(rows, "phase", "case"):
        best: dict[tuple[str, int], Row] = {}
        for row in group:
            key = row["backend"], row["page_size"]
            if key not in best or rate(row) > rate(best[key]):
                best[key] = row
        ordered = sorted(best.values(), key=lambda row: -rate(row))
        ours = next((row for row in ordered if row["backend"] == OURS), None)
        peer = next((row for row in ordered if row["backend"] != OURS), None)
        found.append((ours, peer, [row for row in ordered if row is not ours and row is not peer]))
    return found


def bound(row: Row, profiles: Iterable[Row]) -> float | None:
    """Return the tokens/s that a row would reach if attention took no time; None if its kernels were not profiled.

    The round's time is then the measured time minus the µs in which only attention kernels ran.
    """
    for one in profiles:
        if all(one[name] == row[name] for name in ("case", "backend", "page_size")) and "attention_us" in one:
            spent = float(row["median_round_us"])
            return rate(row) * spent / (spent - float(one["attention_us"]))
    return None


def _by(rows: Iterable[Row], *names: str) -> list[tuple[Any, list[Row]]]:
    """Group rows by fields, in the order of their first appearance."""
    listed = list(rows)
    order = list(dict.fromkeys(tuple(row[name] for name in names) for row in listed))
    ordered = sorted(listed, key=lambda row: order.index(tuple(row[name] for name in names)))
    return [(key, list(group)) for key, group in groupby(ordered, lambda row: tuple(row[name] for name in names))]


def tables(record: Row) -> str:
    """Return the tables of each run: one per kind of speculation, one of prefill, and one of profiled rounds."""
    parts = []
    for name, about, run in _runs(record):
        parts.append(f"## {name}\n\n{about['about']}.\n\n{runs.origin(about)}\n\n" if name else "")
        for (of,), rows in _by([row | dict(of=_of(row)) for row in run["rows"]], "of"):
            parts.append(f"**{of}**\n\n{HEAD}")
            parts += [_line(*each, run.get("profiles", [])) for each in compared(rows)]
            parts.append("\n")
        parts.append(rounds(run))
    return "".join(parts) + texts(record)


def summary(record: Row) -> str:
    """Return the lowest, median and highest ratio for each kind of speculation; trees of all shapes are one kind.

    A ratio is draftmark's tokens/s divided by that of SGLang's fastest backend at the same point of the same run.
    """
    groups: dict[tuple[str, str, str], list[float]] = {}
    for _, _, run in _runs(record):
        for (of,), rows in _by([row | dict(of=_kind(row)) for row in run["rows"]], "of"):
            found = [(ours, peer) for ours, peer, _ in compared(rows) if ours and peer]
            pages = ", ".join(sorted({str(ours["page_size"]) for ours, _ in found}, key=int))
            peers = ", ".join(sorted({NAMES[row["backend"]] for row in rows if row["backend"] != OURS}))
            for ours, peer in found:
                groups.setdefault((of, pages, peers), []).append(rate(ours) / rate(peer))
    lines = []
    for about, ratios in sorted(groups.items(), key=lambda group: (_place(group[0][0]), int(group[0][1]))):
        numbers = [f"{one:.2f}" for one in (min(ratios), median(ratios), max(ratios))]
        lines.append(f"| {' | '.join([*about, str(len(ratios)), *numbers])} |")
    return SUMMARY + "\n".join(lines)


def _place(heading: str) -> int:
    """Return the position of a heading in the order of tables: prefill first, then the order of `HEADINGS`."""
    return next((1 + i for i, one in enumerate(HEADINGS.values()) if heading.startswith(one)), 0)


def _runs(record: Row) -> list[tuple[str, Row, Row]]:
    """Return the name and the description of each run, and its part of the record."""
    if "runs" not in record:
        return [("", {}, record)]
    lists = ("rows", "profiles")
    return [
        (name, about, {part: [one for one in record[part] if one["run"] == name] for part in lists})
        for name, about in record["runs"].items()
    ]


def _line(ours: Row | None, peer: Row | None, others: list[Row], profiles: list[Row]) -> str:
    """Return the line of one point: draftmark's fastest row, SGLang's fastest row, their ratio."""
    some = ours or peer or others[0]
    ratio = most = "–"
    if ours and peer:
        ratio = f"{rate(ours) / rate(peer):.2f}"
        free = bound(ours, profiles) if ours["phase"] != "prefill" else None
        most = f"{free / rate(peer):.2f}" if free else "–"
    cells = [f"{some['num_reqs']} × {some['prompt_len'] // 1024}k", _called(ours, False) if ours else "–"]
    cells += [_called(peer) if peer else "–", ratio, most, ", ".join(_called(one) for one in others)]
    return f"| {' | '.join(cells)} |\n"


def rounds(record: Row) -> str:
    """Return the table of profiled rounds, in µs. Idle time is the round without a profiler minus the busy time."""
    # A prefill row has the same key as a decode row, and would replace it in `measured`.
    decoding = [row for row in record["rows"] if row["phase"] != "prefill"]
    measured = {(row["case"], row["backend"], row["page_size"]): row for row in decoding}
    lines = []
    for one in record.get("profiles", []):
        row = measured.get((one["case"], one["backend"], one["page_size"]))
        if row is None or "attention_us" not in one or "median_round_us" not in row:
            continue
        spent, busy, attention = row["median_round_us"], one["busy_us"], one["attention_us"]
        called = f"{NAMES.get(one['backend'], one['backend'])} (p{one['page_size']})"
        idle = max(0, spent - busy)
        lines.append(f"| {one['case']} | {called} | {spent:,.0f} | {busy:,.0f} | {attention:,.0f} |")
        lines[-1] += f" {busy - attention:,.0f} | {idle:,.0f} |\n"
    return f"**Where a round goes**, µs\n\n{ROUNDS}{''.join(lines)}\n" if lines else ""


def texts(record: Row) -> str:
    """Return the table of texts compared with plain decoding."""
    lines = []
    for one in record.get("equality", []):
        called = f"| {NAMES.get(one['backend'], one['backend'])} | {one['case']}, page {one['page_size']} |"
        if "texts" not in one:
            lines.append(f"{called} {one['result']} | – |\n")
            continue
        near = sum(part["near_tie"] for part in one["parted"])
        lines.append(f"{called} {one['equal']} of {one['texts']} | {near} of {len(one['parted'])} |\n")
    return f"**Texts**\n\n{TEXTS}{''.join(lines)}\n" if lines else ""


def _of(row: Row) -> str:
    """Return the heading of a row's table."""
    if row["phase"] == "prefill":
        return "prefill"
    shape = row["case"].split()[0].removeprefix(row["speculate"]).strip("()").replace(",", ", ")
    return HEADINGS[row["speculate"]] + (f" ({shape})" if shape else "")


def _kind(row: Row) -> str:
    """Return the heading of a row's line in the summary."""
    return HEADINGS["tree"] if row["phase"] != "prefill" and row["speculate"] == "tree" else _of(row)


def _called(row: Row, named: bool = True) -> str:
    backend: str = row["backend"]
    name = NAMES.get(backend, backend) + " " if named else ""
    stuck_out = "*" if rate(row) != row["tokens_per_s"] else ""
    return f"{name}{rate(row):,.0f}{stuck_out} (p{row['page_size']})"


def page(text: str, record: Row) -> str:
    """Return a page's text with the summary between its marks."""
    return runs.between(text, BEGIN, END, summary(record))


def main() -> None:
    """Put a run into the record if one is given, and write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", nargs="+", metavar="NAME ROWS ABOUT [TEXTS]", help="put a run's files into the record")
    options = parser.parse_args()
    if options.run:
        name, *files = options.run
        if len(files) not in (2, 3):
            parser.error(f"--run takes a name and two or three files, and got {len(files)}: {', '.join(files)}")
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        write_record(with_run(record, name, *(json.loads(Path(one).read_text()) for one in files)), RECORD)
    PAGE.write_text(page(PAGE.read_text(), json.loads(RECORD.read_text())))


if __name__ == "__main__":
    main()
