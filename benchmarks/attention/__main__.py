"""Times attention of draftmark's CUDA plugins and of other libraries (peers) on one GPU, in one process.

    python -m benchmarks.attention --json benchmarks/results/attention-h200.json [--case NAME …] [--backend NAME …]

Every output is checked against float64 before it is timed. A time is the median of several turns. In a turn each
backend replays its CUDA graph for a few milliseconds; the first turns are warm-up. Calls rotate through KV sets that
are together larger than L2. Schedules and plans are made before the timed calls, for peers too; `metadata-256` times
ours. TB/s counts K and V once.

A run measures the cases of `cases` and the fixed subset of `grid`. Other sets of cases:

* `--grid --seconds 300` measures as much of the whole grid as fits. It resumes from the file of --json if commit and
  device are equal.
* `--pages 16 64` measures each case with pages of these sizes, which alternate in the turns.
* `--case` measures the named cases, in the grid or not: ``--case verify16-64x8192@32/8x160-p16``.
* `--drawn 100 --seed 7` measures 100 random cases (`drawn`).

`--append` adds the run to the file of an earlier run, under `later_runs`, with its own commit.
`--version old=FOLDER new=FOLDER` also measures copies of the package `draftmark_cuda_triton`, as backends with these
names. `--warm 16` first compiles our kernels in 16 processes.
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
    """Measure the selected cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs="*", default=[])
    parser.add_argument("--backend", nargs="*")
    parser.add_argument("--grid", action="store_true", help="measure the whole grid; resume from the file of --json")
    parser.add_argument("--drawn", type=int, default=0, metavar="COUNT", help="measure this number of random cases")
    parser.add_argument("--seed", type=int, default=0, help="seed of --drawn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--turns", type=int, default=TURNS, help="number of timed turns of each backend")
    parser.add_argument("--pages", nargs="+", type=int, help="measure each case with these page sizes, in tokens")
    parser.add_argument(
        "--version", nargs="+", default=[], metavar="NAME=FOLDER", help="copies of cuda_triton's package"
    )
    parser.add_argument("--warm", type=int, default=0, help="compile the kernels first, in this number of processes")
    parser.add_argument("--append", action="store_true", help="keep the file's run and add this one to its later_runs")
    parser.add_argument("--commit", default="", help="commit to record; by default git's HEAD")
    args = parser.parse_args()
    if args.append and not (args.json and args.json.is_file()):
        parser.error(f"--append adds to a file, but --json is {args.json}; name the file of an earlier run")
    if args.grid and args.pages:
        parser.error(f"--grid fixes the page sizes of its cases, but --pages is {args.pages}; leave one of them out")
    try:
        cases = [named(name) for name in args.case] or [*drawn(args.drawn, args.seed)]
        cases = cases or [*(without_page_sizes() if args.pages else CASES + SUBSET)]
        own = versions(args.version)
    except ValueError as error:
        parser.error(str(error))
    OURS.update(own)
    commit, names = args.commit or origin.commit(), {*args.backend, *own} if args.backend else None
    begun = time.monotonic()

    def late() -> bool:
        return time.monotonic() - begun > args.seconds

    def warmed(wanted: Sequence[Case]) -> None:
        if args.warm:
            ours = [name for name in OURS if names is None or name in names]
            warm(wanted, ours, args.version, args.warm, args.seconds / 3)

    if args.grid:
        measure_grid(args.json, commit, names, args.turns, late, warmed)
        return
    paged = [case.paged(page) for page in args.pages or () for case in cases]
    warmed(paged or cases)
    apart = args.case or args.drawn or args.pages
    metadata, memory = ([], []) if apart else (metadata_rows() + plan_rows(), memory_rows() + key_rows())
    rows = []
    for case in cases:
        if not late():
            pages = args.pages
            rows += measure_pages(case, pages, names, args.turns) if pages else measure(case, names, args.turns)
            torch.cuda.empty_cache()
    result = described(commit, rows) | {"metadata": metadata, "graph_state": memory}
    if args.append:
        first = json.loads(args.json.read_text(encoding="utf-8"))
        these = {row["backend"] for row in rows}
        kept = [run for run in first.get("later_runs", []) if {row["backend"] for row in run["rows"]} != these]
        result = first | {"later_runs": [*kept, result]}
    origin.write(args.json, result)


def without_page_sizes() -> tuple[Case, ...]:
    """Return the usual cases without duplicates. Their names have no page size."""
    plain = [replace(case, name=case.name.split("@")[0], model=case.model.paged(64)) for case in CASES + SUBSET]
    return tuple(dict.fromkeys(plain))


def described(commit: str, rows: list[dict]) -> dict:
    """Return a run's rows with its commit, device and versions."""
    versions = origin.versions("torch", "triton", "flashinfer-python", "draftmark") | stubs.versions()
    return {
        "schema": 1, "commit": commit, "device": torch.cuda.get_device_name(), "versions": versions, "rows": rows,
    }  # fmt: skip


def measure_grid(
    path: Path | None,
    commit: str,
    names: set[str] | None,
    turns: int,
    late: Callable[[], bool],
    warmed: Callable[[Sequence[Case]], None],
) -> None:
    """Measure as much of the grid as there is time for, and write the file after each case."""
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
        result["rows"] += measure(case, names, turns)
        torch.cuda.empty_cache()
        origin.write(path, result)


if __name__ == "__main__":
    main()
