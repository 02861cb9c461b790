"""Attention of draftmark's CUDA plugins beside every peer that can be run here, on one GPU, in one process.

    python -m benchmarks.attention --json benchmarks/results/attention-h200.json [--case NAME …] [--backend NAME …]

A run of some backends joins the file of a run of all with `--append`, under `later_runs`, with a commit of its own.

Every answer is checked against float64 before it is timed. A time is the median of CUDA-graph replays in turns of a
few milliseconds, behind some that do not count; calls rotate through KV sets larger than L2 together. Schedules and
plans are made before the timed calls, for peers too; `metadata-256` times ours. TB/s counts K and V once.

Every run measures the cases of `cases` and the fixed subset of `grid`. `--grid --seconds 300` measures as much of the
whole grid as fits, and goes on where the file of --json ends, as long as the commit and the device are the same.
`--pages 16 64` measures each of those cases with pages of these sizes instead, which take turns. `--case` measures
those that it names, in the grid or not: ``--case verify16-64x8192@32/8x160-p16``. `--drawn 100 --seed 7` measures so
many that nobody chose (`drawn`).

`--version old=FOLDER new=FOLDER` measures copies of the package `draftmark_cuda_triton` too, as backends of those
names, which take turns with the others. `--warm 16` compiles our kernels beforehand, in 16 processes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import origin

from . import stubs
from .cases import CASES, Case
from .drawn import drawn
from .grid import SUBSET, grid, named
from .measuring import TURNS, measure, measure_pages
from .ours import OURS, memory_rows, metadata_rows
from .stock import key_rows, plan_rows
from .versions import versions
from .warming import warm


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs="*", default=[])
    parser.add_argument("--backend", nargs="*")
    parser.add_argument("--grid", action="store_true", help="the whole grid, resumed from --json's file")
    parser.add_argument("--drawn", type=int, default=0, metavar="COUNT", help="so many cases that are drawn")
    parser.add_argument("--seed", type=int, default=0, help="what --drawn follows from")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after so many")
    parser.add_argument("--turns", type=int, default=TURNS, help="time the backends of a case so many times, in turns")
    parser.add_argument("--pages", nargs="+", type=int, help="each case with pages of so many tokens, in turns")
    parser.add_argument(
        "--version", nargs="+", default=[], metavar="NAME=FOLDER", help="copies of cuda_triton's package"
    )
    parser.add_argument("--warm", type=int, default=0, help="compile beforehand, in so many processes")
    parser.add_argument("--append", action="store_true", help="keep the file's run, add this one to its later_runs")
    parser.add_argument("--commit", default="", help="recorded as is; by default asked of git")
    args = parser.parse_args()
    if args.append and not (args.json and args.json.is_file()):
        parser.error(f"--append adds to a file, but --json is {args.json}; name one that a run of all has written")
    if args.grid and args.pages:
        parser.error(f"--grid has the page sizes of its own cases, but --pages is {args.pages}; leave one of them out")
    try:
        cases = [named(name) for name in args.case] or [*drawn(args.drawn, args.seed)]
        cases = cases or [*(whatever_the_pages() if args.pages else CASES + SUBSET)]
        own = versions(args.version)
    except ValueError as error:
        parser.error(str(error))
    OURS.update(own)
    commit, asked = args.commit or origin.commit(), {*args.backend, *own} if args.backend else None
    begun = time.monotonic()

    def late() -> bool:
        return time.monotonic() - begun > args.seconds

    def warmed(wanted: Sequence[Case]) -> None:
        if args.warm:
            names = [name for name in OURS if asked is None or name in asked]
            warm(wanted, names, args.version, args.warm, args.seconds / 3)

    if args.grid:
        measure_grid(args.json, commit, asked, args.turns, late, warmed)
        return
    paged = [case.paged(page) for page in args.pages or () for case in cases]
    warmed(paged or cases)
    apart = args.case or args.drawn or args.pages
    metadata, memory = ([], []) if apart else (metadata_rows() + plan_rows(), memory_rows() + key_rows())
    rows = []
    for case in cases:
        if not late():
            pages = args.pages
            rows += measure_pages(case, pages, asked, args.turns) if pages else measure(case, asked, args.turns)
            torch.cuda.empty_cache()
    result = described(commit, rows) | {"metadata": metadata, "graph_state": memory}
    if args.append:
        first = json.loads(args.json.read_text(encoding="utf-8"))
        these = {row["backend"] for row in rows}
        kept = [run for run in first.get("later_runs", []) if {row["backend"] for row in run["rows"]} != these]
        result = first | {"later_runs": [*kept, result]}
    origin.write(args.json, result)


def whatever_the_pages() -> tuple[Case, ...]:
    """The same cases, each once, under names that say nothing of pages."""
    plain = [replace(case, name=case.name.split("@")[0], model=case.model.paged(64)) for case in CASES + SUBSET]
    return tuple(dict.fromkeys(plain))


def described(commit: str, rows: list[dict]) -> dict:
    """A run's rows, and what was measured where."""
    versions = origin.versions("torch", "triton", "flashinfer-python", "draftmark") | stubs.versions()
    return {
        "schema": 1, "commit": commit, "device": torch.cuda.get_device_name(), "versions": versions, "rows": rows,
    }  # fmt: skip


def measure_grid(
    path: Path | None,
    commit: str,
    asked: set[str] | None,
    turns: int,
    late: Callable[[], bool],
    warmed: Callable[[Sequence[Case]], None],
) -> None:
    """As much of the grid as there is time for; the file grows by a case at a time."""
    result = described(commit, [])
    if path and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if (before["commit"], before["device"]) == (commit, result["device"]):
            result = before
    known = {row["case"] for row in result["rows"]}
    left = [case for case in grid() if case.name not in known]
    warmed(left)
    for case in left:
        if late():
            break
        result["rows"] += measure(case, asked, turns)
        torch.cuda.empty_cache()
        origin.write(path, result)


if __name__ == "__main__":
    main()
