"""Table of a serving record, for the engine's page.

    python -m benchmarks.serving.tables                    # write the tables of all records that exist
    python -m benchmarks.serving.tables --print RECORD.json

A line has one server. Its columns are of the first workload of its run: the first pass ("cold") and the second
("again"). A record can have `other_runs` of its engine and device, each with its commit, workloads, starts and rows.
They give the lines of servers that the record's own run did not have.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.runs import between, origin

from .servers import OURS

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- serving: written by benchmarks.serving.tables -->", "<!-- /serving -->"
RECORDS = {engine: ROOT / "benchmarks" / "results" / f"{engine}-serving-h200.json" for engine in OURS}
PAGES = {engine: ROOT / "docs" / f"{engine}.md" for engine in OURS}
DRAFTERS = {"ngram": "n-gram", "eagle3": "EAGLE-3", "mtp": "MTP", "none": "none"}
"""Map from a record's drafters to a page's words, in the order of the lines."""
TITLES = (
    "drafts", "backend", "start, s", "later start, s", "tokens/s, cold", "again", "first token, ms",
    "between tokens, ms", "worst, again", "compiled",
)  # fmt: skip
LEFT = 2
"""Number of columns of words; the others are numbers."""

SERVER = ("backend", "drafter", "page_size", "tree", "prefix_cache")
"""Fields of a row that name its server, besides the mode of the monitor."""

Row = dict[str, Any]


def summary(record: Row) -> str:
    """Return the table of a record, its origin, and the servers that ended early or did not run."""
    lines = [_line(TITLES), f"|{'---|' * LEFT}{'---:|' * (len(TITLES) - LEFT)}"]
    found: dict[tuple[Any, ...], tuple[Row, str]] = {}
    for run in _runs(record):
        for row, line in _servers(record, run):
            found.setdefault(tuple(str(row.get(name)) for name in SERVER), (row, line))
    rank = list(DRAFTERS).index
    lines += [
        line
        for row, line in sorted(found.values(), key=lambda one: (rank(one[0]["drafter"]), _is_ours(record, one[0])))
    ]
    parts = ["\n".join(lines), _explained(record), _capacities(record), origin(record), *_ended(record)]
    return "\n\n".join(filter(None, parts))


def _runs(record: Row) -> list[Row]:
    return [record, *record.get("other_runs", ())]


def _servers(record: Row, run: Row) -> Iterator[tuple[Row, str]]:
    """Yield the cold row and the line of each server of a run."""
    workload = run["workloads"][0]["name"]
    own = [row for row in run["rows"] if row["workload"] == workload]
    # A server that the monitor may end has a line only if no other server has its configuration.
    rows = [row for row in own if "monitor_mode" not in row or not _one(own, _unmonitored(row), row["pass"])]
    for row in rows:
        if row["pass"] == "cold" and "tokens_per_s" in row:
            yield row, _line(_cells(run, row, _one(rows, row, "again"), _is_ours(record, row)))


def _cells(run: Row, cold: Row, again: Row, is_ours: bool) -> list[str]:
    comparable = (one for one in run["starts"] if _same(one, cold) and (one["alone"] or one.get("paired")))
    starts = {one["start"]: one["seconds"] for one in comparable}
    name = cold["backend"].removeprefix(OURS["vllm"])
    return [
        _drafts(cold),
        f"`{name}`" if is_ours else name,
        _number(starts.get("first")),
        _number(starts.get("second")),
        _number(cold["tokens_per_s"]),
        _number(again.get("tokens_per_s")),
        _joined(cold, "first_token", ("p50", "p99")),
        _joined(cold, "between", ("p50", "p99", "worst")),
        _number(again.get("between_worst_ms")),
        f"{cold['compiled']} ({cold['compile_s']:.1f} s)" if cold["compiled"] else "0",
    ]


def _drafts(row: Row) -> str:
    tree = f" tree ({', '.join(map(str, row['tree']))})" if "tree" in row else ""
    return DRAFTERS[row["drafter"]] + tree + (", prefix cache" if row.get("prefix_cache") else "")


def _explained(record: Row) -> str:
    """Return what the columns mean and what the workload was."""
    one = record["workloads"][0]
    (least, most), (few, many) = one["prompt"], one["new"]
    return (
        f"{one['requests']} requests, {1000 * one['gap_s']:.0f} ms apart on average, of {least:,} to {most:,} prompt "
        f"tokens and {few} to {many} new ones. *Cold* is the first pass, with empty caches, *again* the second. "
        "Latencies (first token p50/p99, between tokens p50/p99/worst) and compiled Triton kernels are of cold passes."
        + (
            " Servers with start times started together."
            if any(one.get("paired") for run in _runs(record) for one in run["starts"])
            else ""
        )
    )


def _capacities(record: Row) -> str:
    """Return the slots of recurrent state and the requests that fit, where SGLang computed them; "" without any."""
    fit = [row for row in record["starts"] if "slots" in row and row.get("prefix_cache") and row["start"] == "first"]
    if not fit:
        return ""
    head = [_line(("drafts", "backend", "state slots", "requests that fit")), "|---|---|---:|---:|"]
    return "\n".join(
        head + [_line((_drafts(row), row["backend"], str(row["slots"]), str(row["requests"]))) for row in fit]
    )


def _ended(record: Row) -> list[str]:
    """Return a list of what the monitor of compilations, other failures and missing time ended, and the notes."""
    rows = [row for run in _runs(record) for row in run["rows"]]
    strict = Counter(_named(row) for row in rows if row.get("monitor_mode") == "error" and not row["failed"])
    found = [f"* {name}: no compilation in {count} passes." for name, count in strict.items()]
    found += [f"* {_named(row)}, {row['what']}: {row['why']}" for row in record["failed"]]
    for why in dict.fromkeys(row["why"] for row in record["not_run"]):
        names = dict.fromkeys(_named(_unmonitored(row)) for row in record["not_run"] if row["why"] == why)
        found.append(f"* Not run, {why}: {'; '.join(names)}.")
    found += [f"* {note}" for note in record.get("notes", ())]
    return ["\n".join(found)] if found else []


def _named(row: Row) -> str:
    monitored = f", `--jit-monitor-mode {row['monitor_mode']}`" if "monitor_mode" in row else ""
    return f"{row['backend']}, {_drafts(row)}{monitored}".replace(", none", ", no drafts")


def _is_ours(record: Row, row: Row) -> bool:
    return bool(row["backend"].startswith(OURS[record["engine"]]))


def _same(one: Row, other: Row) -> bool:
    return all(one.get(name) == other.get(name) for name in (*SERVER, "monitor_mode"))


def _one(rows: Iterable[Row], like: Row, which: str) -> Row:
    return next((row for row in rows if _same(row, like) and row["pass"] == which), {})


def _unmonitored(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "monitor_mode"}


def _joined(row: Row, what: str, names: Iterable[str]) -> str:
    return "/".join(_number(row.get(f"{what}_{name}_ms")) for name in names)


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _line(cells: Iterable[str]) -> str:
    return f"|{'|'.join(cells)}|"


def main() -> None:
    """Write every engine's table into its page, or print one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", type=Path, metavar="RECORD.json", dest="shown")
    asked = parser.parse_args()
    if asked.shown is not None:
        print(summary(json.loads(asked.shown.read_text())))
        return
    for engine, record in RECORDS.items():
        if record.exists():
            made = summary(json.loads(record.read_text()))
            PAGES[engine].write_text(between(PAGES[engine].read_text(), BEGIN, END, made))


if __name__ == "__main__":
    main()
