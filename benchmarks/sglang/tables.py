"""The record of a run, and from it the tables of docs/sglang.md.

python -m benchmarks.sglang.tables                                  # write the tables into the page
python -m benchmarks.sglang.tables --run NAME ROWS.json ABOUT.json [TEXTS.json]     # put a run's files into the record

A record holds the rows of several runs, each with the name of its run. Rows of two runs are never compared: they are of
other machines, or of other hours of one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks import runs

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "results" / "sglang-h200.json"
EARLIER = RECORD.with_name("sglang-h200-earlier.json")
PAGE = ROOT / "docs" / "sglang.md"
BEGIN, END = "<!-- from benchmarks/results/sglang-h200.json -->", "<!-- end -->"
OURS = "draftmark"
STUCK_OUT = 1.4
"""A round that takes as many times the median is none of the others' kind."""
NAMES = {"fa3": "FA3", "flashinfer": "FlashInfer", "triton": "Triton"}
HEADINGS = {
    "none": "plain",
    "chain": "a chain of 3 drafts",
    "tree": "a tree of topk, steps, nodes",
    "ngram": "an n-gram tree of nodes",
}

HEAD = "| requests × prompt | draftmark | SGLang's best | ratio | bound | others |\n|---|---:|---:|---:|---:|---|\n"
ROUNDS = "| case | backend | round | busy | attention alone | all else | idle |\n|---|---|---:|---:|---:|---:|---:|\n"
THEN = "| case | page | draftmark | FA3 | FlashInfer | Triton |\n|---|---:|---:|---:|---:|---:|\n"
TEXTS = "| backend | case | texts equal to plain decoding's | others, parted at a near tie |\n|---|---|---:|---:|\n"

Row = dict[str, Any]


def with_run(record: Row, name: str, rows: Row, about: Row, texts: Iterable[Row] = ()) -> Row:
    """The record with a run's files in it: profiles apart, and of what was not measured only the names.

    A run of a name that the record has already takes its place.
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
    """One line for a row: a record is read by people too."""
    parts = []
    for name, value in record.items():
        if isinstance(value, list) and value:
            inner = ",\n  ".join(json.dumps(one) for one in value)
            parts.append(f" {json.dumps(name)}: [\n  {inner}\n ]")
        elif name == "runs":
            inner = ",\n  ".join(f"{json.dumps(run)}: {json.dumps(said)}" for run, said in value.items())
            parts.append(f" {json.dumps(name)}: {{\n  {inner}\n }}")
        else:
            parts.append(f" {json.dumps(name)}: {json.dumps(value)}")
    out.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def rate(row: Row) -> float:
    """Tokens a second; of the median round, where one round stuck out, as one in which a backend compiles a kernel."""
    median = row.get("median_round_us", 0.0)
    if row.get("longest_round_us", 0.0) <= STUCK_OUT * median:
        return float(row["tokens_per_s"])
    return float(row["num_reqs"] * row["accept_len"] * 1e6 / median)


def compared(rows: Iterable[Row]) -> list[tuple[Row | None, Row | None, list[Row]]]:
    """Of each case and phase draftmark's fastest row, the fastest of SGLang's own backends, and all others.

    A point that was measured twice counts with the better of both, whoever it is. None: nothing was measured.
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
    """Tokens a second of a row, if its attention took no time; None where its kernels were not listed with their times.

    A round of as much as was measured, less the µs in which nothing but attention ran.
    """
    for one in profiles:
        if all(one[name] == row[name] for name in ("case", "backend", "page_size")) and "attention_us" in one:
            spent = float(row["median_round_us"])
            return rate(row) * spent / (spent - float(one["attention_us"]))
    return None


def _by(rows: Iterable[Row], *names: str) -> list[tuple[Any, list[Row]]]:
    """Rows by fields, in the order in which these first come."""
    listed = list(rows)
    order = list(dict.fromkeys(tuple(row[name] for name in names) for row in listed))
    ordered = sorted(listed, key=lambda row: order.index(tuple(row[name] for name in names)))
    return [(key, list(group)) for key, group in groupby(ordered, lambda row: tuple(row[name] for name in names))]


def tables(record: Row, earlier: Row | None = None) -> str:
    """All rows, run by run: a table for each way to speculate, one of prefill; then where rounds go.

    Behind them whose texts are equal, and what an earlier run alone measured.
    """
    parts = []
    for about, run in _runs(record):
        parts.append(f"**{about}**\n\n" if about else "")
        for (of,), rows in _by([row | dict(of=_of(row)) for row in run["rows"]], "of"):
            parts.append(f"**{of}**\n\n{HEAD}")
            parts += [_line(*each, run.get("profiles", [])) for each in compared(rows)]
            parts.append("\n")
        parts.append(rounds(run))
    return "".join(parts) + texts(record) + (then(record, earlier) if earlier else "")


def _runs(record: Row) -> list[tuple[str, Row]]:
    """What is said of each run, and its part of the record; the record itself, where runs are not told apart."""
    if "runs" not in record:
        return [("", record)]
    lists = ("rows", "profiles")
    return [
        (said["about"], {part: [one for one in record[part] if one["run"] == name] for part in lists})
        for name, said in record["runs"].items()
    ]


def _line(ours: Row | None, peer: Row | None, others: list[Row], profiles: list[Row]) -> str:
    """A point, and how draftmark's best and SGLang's best compare there."""
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
    """Where the µs of each profiled round go; the GPU idles for what a round takes beyond that, unprofiled."""
    decoding = [row for row in record["rows"] if row["phase"] != "prefill"]  # a prefill has the same case as a decode
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


def then(record: Row, earlier: Row) -> str:
    """Tokens a second of an earlier run: the points of which a backend was not measured again, with all that were then.

    No ratio: what ran beside the two runs differs, and so only a line's own cells may be compared.
    """
    measured = {_where(row) for row in record["rows"]}
    lines = []
    for (_, case, size), rows in _by(earlier["rows"], "phase", "case", "page_size"):
        if all(_where(row) in measured for row in rows):
            continue
        rates = {row["backend"]: row["tokens_per_s"] for row in sorted(rows, key=lambda row: row["tokens_per_s"])}
        called = case.replace("none", "prefill") if rows[0]["phase"] == "prefill" else case
        cells = [f"{rates[name]:,.0f}" if name in rates else "–" for name in (OURS, *NAMES)]
        lines.append(f"| {called} | {size} | {' | '.join(cells)} |\n")
    about = (
        f"**An earlier run** (commit {earlier['commit']}, {earlier['date']}), where it measured more; tokens a second"
    )
    return f"{about}\n\n{THEN}{''.join(lines)}\n" if lines else ""


def texts(record: Row) -> str:
    """Texts beside those of plain decoding."""
    lines = []
    for one in record.get("equality", []):
        called = f"| {NAMES.get(one['backend'], one['backend'])} | {one['case']}, page {one['page_size']} |"
        if "texts" not in one:
            lines.append(f"{called} {one['result']} | – |\n")
            continue
        near = sum(part["near_tie"] for part in one["parted"])
        lines.append(f"{called} {one['equal']} of {one['texts']} | {near} of {len(one['parted'])} |\n")
    return f"**Texts**\n\n{TEXTS}{''.join(lines)}\n" if lines else ""


def _where(row: Row) -> tuple[str, str, str, int]:
    return row["phase"], row["case"], row["backend"], row["page_size"]


def _of(row: Row) -> str:
    """The heading that a row stands under."""
    if row["phase"] == "prefill":
        return "prefill"
    shape = row["case"].split()[0].removeprefix(row["speculate"]).strip("()").replace(",", ", ")
    return HEADINGS[row["speculate"]] + (f" ({shape})" if shape else "")


def _called(row: Row, named: bool = True) -> str:
    backend: str = row["backend"]
    name = NAMES.get(backend, backend) + " " if named else ""
    stuck_out = "*" if rate(row) != row["tokens_per_s"] else ""
    return f"{name}{rate(row):,.0f}{stuck_out} (p{row['page_size']})"


def page(text: str, record: Row, earlier: Row | None = None) -> str:
    """The page with its tables made anew."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(record, earlier)}{END}{rest.split(END)[1]}"


def main() -> None:
    """Make the record, if asked, and write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang.tables")
    parser.add_argument("--run", nargs="+", metavar="NAME ROWS ABOUT [TEXTS]", help="put a run's files into the record")
    options = parser.parse_args()
    if options.run:
        name, *files = options.run
        if len(files) not in (2, 3):
            parser.error(f"--run takes a name and two or three files, and was given {len(files)}: {', '.join(files)}")
        record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
        write_record(with_run(record, name, *(json.loads(Path(one).read_text()) for one in files)), RECORD)
    record, earlier = (json.loads(one.read_text()) for one in (RECORD, EARLIER))
    PAGE.write_text(page(PAGE.read_text(), record, earlier))


if __name__ == "__main__":
    main()
