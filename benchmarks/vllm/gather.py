"""python -m benchmarks.vllm.gather RECORD.json RESULT.json --run NAME --about TEXT: add a run's rows to a record.

A record holds the rows of several runs, each with the name of its run, and says of each run what it was and what else
its host did meanwhile. Speeds are those of turns of one pace (`turns`). A run of a name that the record has already
takes its place, or with --keep moves it behind itself under another name: rows that a shorter run does not reach are
not lost.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.runs import with_run

from .turns import levelled

LISTS = ("equality", "rows", "drafting", "profiles")
OF_A_RUN = ("device", "commit", "versions", "start_s", "failed", "not_run")


def gather(
    record: dict[str, Any], result: dict[str, Any], run: str, about: str, keep: tuple[str, str] | None = None
) -> dict[str, Any]:
    """The record with the run in it.

    Args:
        keep: name, and what is said about it, under which the record's run of that name goes on; None drops it.

    Raises:
        ValueError: a text of the result is not judged, so it would be recorded with all its tokens; there is no run
            to keep, or one of the name under which it shall be kept.
    """
    unjudged = [row["backend"] for row in result["equality"] + result.get("drafting", []) if "wrong_texts" not in row]
    if unjudged:
        raise ValueError(f"texts of {', '.join(unjudged)} are not judged; run python -m benchmarks.vllm.judged before")
    if keep is not None:
        record = _moved(record, run, *keep)
    said = {"about": about, **{name: result[name] for name in OF_A_RUN if name in result}}
    before = record.get("runs", {})
    found: dict[str, Any] = {"schema": 2, "runs": _placed(before, run, said, keep[0] if keep else None)}
    result = {**result, "rows": levelled(result["rows"])}
    for name in LISTS:
        found[name] = with_run(record.get(name, ()), run, result.get(name, ()))
    return found


def _moved(record: dict[str, Any], run: str, name: str, about: str) -> dict[str, Any]:
    """The record with a run under another name."""
    runs = record.get("runs", {})
    if run not in runs or name in runs:
        why = f"has no run {run!r}" if run not in runs else f"has a run {name!r} already"
        raise ValueError(f"--keep moves run {run!r} to {name!r}, but the record {why}; its runs are {sorted(runs)}")
    moved: dict[str, Any] = {**record, "runs": {}}
    for old, said in runs.items():
        moved["runs"] |= {name: {**said, "about": about}} if old == run else {old: said}
    for part in LISTS:
        moved[part] = [{**row, "run": name} if row["run"] == run else row for row in record.get(part, ())]
    return moved


def _placed(runs: dict[str, Any], run: str, said: dict[str, Any], behind: str | None) -> dict[str, Any]:
    """The runs with a new one: in the place of its name, in front of the one that made room, or last."""
    placed: dict[str, Any] = {}
    for name, one in runs.items():
        placed |= {run: said, name: one} if name == behind else {name: said if name == run else one}
    placed.setdefault(run, said)
    return placed


def main() -> None:
    """Write the record anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--run", required=True, help="its name")
    parser.add_argument("--about", required=True, help="what it was, and what else its host did")
    parser.add_argument(
        "--keep", nargs=2, metavar=("NAME", "ABOUT"), help="keep the record's run of --run's name, under this one"
    )
    asked = parser.parse_args()
    keep = tuple(asked.keep) if asked.keep else None
    record = json.loads(asked.record.read_text()) if asked.record.exists() else {}
    made = gather(record, json.loads(asked.result.read_text()), asked.run, asked.about, keep)
    asked.record.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
