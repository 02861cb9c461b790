"""python -m benchmarks.vllm.gather RECORD.json RESULT.json --run NAME --about TEXT: add a run's rows to a record.

A record holds the rows of several runs, each with the name of its run, and says of each run what it was and what else
its host did meanwhile. A run of a name that the record has already takes its place.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LISTS = ("equality", "rows", "drafting", "profiles")
OF_A_RUN = ("device", "commit", "versions", "start_s", "failed", "not_run")


def gather(record: dict[str, Any], result: dict[str, Any], run: str, about: str) -> dict[str, Any]:
    """The record with the run in it.

    Raises:
        ValueError: a text of the result is not judged, so it would be recorded with all its tokens.
    """
    unjudged = [row["backend"] for row in result["equality"] + result.get("drafting", []) if "wrong_texts" not in row]
    if unjudged:
        raise ValueError(f"texts of {', '.join(unjudged)} are not judged; run python -m benchmarks.vllm.judged before")
    runs = {
        **record.get("runs", {}),
        run: {"about": about, **{name: result[name] for name in OF_A_RUN if name in result}},
    }
    found: dict[str, Any] = {"schema": 2, "runs": runs}
    for name in LISTS:
        kept = [row for row in record.get(name, ()) if row["run"] != run]
        found[name] = kept + [{"run": run, **row} for row in result.get(name, ())]
    return found


def main() -> None:
    """Write the record anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--run", required=True, help="its name")
    parser.add_argument("--about", required=True, help="what it was, and what else its host did")
    asked = parser.parse_args()
    record = json.loads(asked.record.read_text()) if asked.record.exists() else {}
    made = gather(record, json.loads(asked.result.read_text()), asked.run, asked.about)
    asked.record.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
