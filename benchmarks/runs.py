"""Records that hold the rows of several runs, each with the name of its run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Row = dict[str, Any]


def with_run(rows: Iterable[Row], run: str, new: Iterable[Row]) -> list[Row]:
    """A record's rows with those of a run behind them, in place of what that run had there before."""
    return [row for row in rows if row["run"] != run] + [{"run": run, **row} for row in new]
