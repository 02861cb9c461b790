"""Add the rows of a run to a record.

Usage: ``python -m benchmarks.vllm.gather RECORD.json RESULT.json --run NAME --about TEXT``.

A record holds the rows of several runs. Each row has the name of its run, and each run has a description that includes
other load on its host. Speeds are corrected for the pace of each turn (`turns`). A run replaces the record's run of the
same name. With --keep the old run stays under another name instead, so that rows that a shorter run lacks are not lost.
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
    """Return the record with the run in it.

    Args:
        record: old record; empty for a new one.
        result: output of ``python -m benchmarks.vllm``, with judged texts.
        run: name of the run.
        about: its description.
        keep: new name and new description of the record's old run of this name; None drops the old run.

    Raises:
        ValueError: a text of the result is not judged, so that all its tokens would be recorded; or there is no run to
            keep, or the name to keep it under is taken.
    """
    unjudged = [row["backend"] for row in result["equality"] + result.get("drafting", []) if "wrong_texts" not in row]
    if unjudged:
        raise ValueError(f"texts of {', '.join(unjudged)} are not judged; run python -m benchmarks.vllm.judged first")
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
    """Return the record with run `run` renamed to `name`, with the description `about`."""
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
    """Return the runs with a new run: in place of the run of this name, before run `behind`, or last."""
    placed: dict[str, Any] = {}
    for name, one in runs.items():
        placed |= {run: said, name: one} if name == behind else {name: said if name == run else one}
    placed.setdefault(run, said)
    return placed


def main() -> None:
    """Add the run and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--run", required=True, help="name of the run")
    parser.add_argument("--about", required=True, help="description of the run, and other load on its host")
    parser.add_argument(
        "--keep", nargs=2, metavar=("NAME", "ABOUT"), help="keep the record's old run of this name under another name"
    )
    asked = parser.parse_args()
    keep = tuple(asked.keep) if asked.keep else None
    record = json.loads(asked.record.read_text()) if asked.record.exists() else {}
    made = gather(record, json.loads(asked.result.read_text()), asked.run, asked.about, keep)
    asked.record.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
