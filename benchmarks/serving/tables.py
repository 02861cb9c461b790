"""Table of a serving record, for the engine's page.

    python -m benchmarks.serving.tables                    # write the tables of all records that exist
    python -m benchmarks.serving.tables --print RECORD.json

A line has one server. Its columns are of the first workload of the record: the first pass ("cold") and the second
("again").
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable
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

Row = dict[str, Any]


def summary(record: Row) -> str:
    """Return the table of a record, its origin, and the servers that ended early or did not run."""
    lines = [_line(TITLES), f"|{'---|' * LEFT}{'---:|' * (len(TITLES) - LEFT)}"]
    workload = record["workloads"][0]["name"]
    own = [row for row in record["rows"] if row["workload"] == workload]
    # A server that the monitor may end has a line only if no other server has its configuration.
    rows = [row for row in own if "monitor_mode" not in row or not _one(own, _unmonitored(row), row["pass"])]
    cold = [row for row in rows if row["pass"] == "cold" and "tokens_per_s" in row]
    for row in sorted(cold, key=lambda one: (list(DRAFTERS).index(one["drafter"]), _is_ours(record, one))):
        lines.append(_line(_cells(record, row, _one(rows, row, "again"))))
    parts = ["\n".join(lines), _explained(record), _capacities(record), origin(record), *_ended(record)]
    return "\n\n".join(filter(None, parts))


def _cells(record: Row, cold: Row, again: Row) -> list[str]:
    comparable = (one for one in record["starts"] if _same(one, cold) and (one["alone"] or one.get("paired")))
    starts = {one["start"]: one["seconds"] for one in comparable}
    name = cold["backend"].removeprefix(OURS["vllm"])
    return [
        _drafts(cold),
        f"`{name}`" if _is_ours(record, cold) else name,
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
        + (" Servers with start times started together." if any(one.get("paired") for one in record["starts"]) else "")
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
    strict = Counter(_named(row) for row in record["rows"] if row.get("monitor_mode") == "error" and not row["failed"])
    found = [f"* {name}: no compilation in {count} passes." for name, count in strict.items()]
    found += [f"* {_named(row)}, {row['what']}: {row['why']}" for row in record["failed"]]
    for why in dict.fromkeys(row["why"] for row in record["not_run"]):
        names = dict.fromkeys(_named(row) for row in record["not_run"] if row["why"] == why)
        found.append(f"* Not run, {why}: {'; '.join(names)}.")
    found += [f"* {note}" for note in record.get("notes", ())]
    return ["\n".join(found)] if found else []


def _named(row: Row) -> str:
    monitored = f", `--jit-monitor-mode {row['monitor_mode']}`" if "monitor_mode" in row else ""
    return f"{row['backend']}, {_drafts(row)}{monitored}".replace(", none", ", no drafts")


def _is_ours(record: Row, row: Row) -> bool:
    return bool(row["backend"].startswith(OURS[record["engine"]]))


def _same(one: Row, other: Row) -> bool:
    names = ("backend", "drafter", "page_size", "tree", "prefix_cache", "monitor_mode")
    return all(one.get(name) == other.get(name) for name in names)


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
    return f"| {' | '.join(cells)} |"


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
