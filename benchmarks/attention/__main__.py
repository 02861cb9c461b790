"""Attention of draftmark's CUDA plugins beside every peer that can be run here, on one GPU, in one process.

    python -m benchmarks.attention --json benchmarks/results/attention-h200.json [--case NAME …] [--backend NAME …]

A run of some backends joins the file of a run of all with `--append`, under `later_runs`, with a commit of its own.

Every answer is checked against float64 before it is timed. A time is the median of CUDA-graph replays, after a
tenth of a second of them; calls rotate through KV sets larger than L2 together. Schedules and plans are made before
the timed calls, for peers too; `metadata-256` times ours. TB/s counts K and V once.

Every run measures the cases of `cases` and the fixed subset of `grid`. `--grid --seconds 300` measures as much of the
whole grid as fits, and goes on where the file of --json ends, as long as the commit and the device are the same.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch

from benchmarks import origin
from draftmark_contract.cli.measuring import relative_error

from . import stubs
from .cases import CASES, Case, Inputs, build, clear_unused, cleared, microseconds, reference
from .grid import SUBSET, grid
from .ours import OURS, memory_rows, metadata_rows, ours
from .peers import Peer, backends
from .stock import key_rows, plan_rows
from .stubs import Absent

TOLERANCE = 1e-2


def measure(case: Case, names: set[str] | None, turns: int = 1) -> list[dict]:
    """One row per backend of one case: each answers, then those whose answers are right are timed, in turns.

    A GPU that its power limits runs what comes first faster: more turns, every other one backwards, and their medians
    tell backends apart that one turn does not.
    """
    inputs = build(case)
    plugins = {name: partial(ours, plugin) for name, plugin in OURS.items()}
    asked: dict[str, Callable[[Inputs], Peer]] = {**plugins, **backends(case)}
    expected: dict[str, torch.Tensor] = {}
    rows: list[dict] = []
    right: list[tuple[dict, Peer]] = []
    for name, make in asked.items():
        if names and name not in names:
            continue
        if name not in OURS:
            clear_unused(inputs)  # peers may read what no token occupies; ours must not mind it
        row = _row(case, name)
        rows.append(row)
        with _told(row):
            peer = make(inputs)
            if _is_right(row, peer, inputs, expected):
                right.append((row, peer))
    for turn in range(turns):
        for row, peer in right if turn % 2 == 0 else right[::-1]:
            with _told(row):
                row["turns"].append(microseconds(peer.calls))
    for row in rows:
        if row["turns"]:
            row["us"] = median(row["turns"])
            row["tb_per_s"] = case.kv_bytes / row["us"] / 1e6
        print(_line(row), flush=True)
    return rows


def _is_right(row: dict, peer: Peer, inputs: Inputs, expected: dict[str, torch.Tensor]) -> bool:
    """Whether a peer answers its question; `expected` keeps the answers of this case."""
    peer.calls[0]()
    torch.cuda.synchronize()
    if peer.tail not in expected:
        clean = tuple(cleared(cache) for cache in inputs.caches[0])
        expected[peer.tail] = reference(inputs, clean, peer.tail)
    worst = relative_error(peer.outs[0], expected[peer.tail])
    right = worst < TOLERANCE
    row |= {"max_err": worst, "checked": right, "tail": peer.tail}
    row["note"] = peer.note if right else "wrong answer, not timed"
    return right


@contextmanager
def _told(row: dict) -> Iterator[None]:
    """A peer that is absent, or fails, is a row that says why; ours must not fail."""
    try:
        yield
    except Absent as absent:
        row["note"] = str(absent)
    except Exception as failure:
        if row["backend"] in OURS:
            raise
        row["note"] = f"failed: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"


def _row(case: Case, name: str) -> dict:
    """What is not known yet of a backend in a case."""
    return {
        "case": case.name, "shape": case.model.shape, "page_size": case.model.page, "kv_dtype": case.model.kv_dtype,
        "backend": name, "us": None, "turns": [], "tb_per_s": None, "max_err": None, "checked": False, "tail": "",
        "note": "",
    }  # fmt: skip


def _line(row: dict) -> str:
    if row["us"] is None:
        return f"{row['case']:36} {row['backend']:20} absent: {row['note']}"
    return (
        f"{row['case']:36} {row['backend']:20} {row['us']:8.1f} us {row['tb_per_s']:5.2f} TB/s "
        f"error {row['max_err']:.1e}  tail {row['tail']}"
    )


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs="*")
    parser.add_argument("--backend", nargs="*")
    parser.add_argument("--grid", action="store_true", help="the whole grid, resumed from --json's file")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after so many")
    parser.add_argument("--turns", type=int, default=1, help="time the backends of a case so many times, in turns")
    parser.add_argument("--append", action="store_true", help="keep the file's run, add this one to its later_runs")
    parser.add_argument("--commit", default="", help="recorded as is; by default asked of git")
    args = parser.parse_args()
    if args.append and not (args.json and args.json.is_file()):
        parser.error(f"--append adds to a file, but --json is {args.json}; name one that a run of all has written")
    commit, asked = args.commit or origin.commit(), set(args.backend) if args.backend else None
    begun = time.monotonic()
    if args.grid:
        measure_grid(args.json, commit, asked, args.turns, lambda: time.monotonic() - begun > args.seconds)
        return
    metadata, memory = ([], []) if args.case else (metadata_rows() + plan_rows(), memory_rows() + key_rows())
    rows = []
    for case in CASES + SUBSET:
        if (not args.case or case.name in args.case) and time.monotonic() - begun <= args.seconds:
            rows += measure(case, asked, args.turns)
            torch.cuda.empty_cache()
    result = described(commit, rows) | {"metadata": metadata, "graph_state": memory}
    if args.append:
        first = json.loads(args.json.read_text(encoding="utf-8"))
        named = {row["backend"] for row in rows}
        kept = [run for run in first.get("later_runs", []) if {row["backend"] for row in run["rows"]} != named]
        result = first | {"later_runs": [*kept, result]}
    origin.write(args.json, result)


def described(commit: str, rows: list[dict]) -> dict:
    """A run's rows, and what was measured where."""
    versions = origin.versions("torch", "triton", "flashinfer-python", "draftmark") | stubs.versions()
    return {
        "schema": 1, "commit": commit, "device": torch.cuda.get_device_name(), "versions": versions, "rows": rows,
    }  # fmt: skip


def measure_grid(path: Path | None, commit: str, asked: set[str] | None, turns: int, late: Callable[[], bool]) -> None:
    """As much of the grid as there is time for; the file grows by a case at a time."""
    result = described(commit, [])
    if path and path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if (before["commit"], before["device"]) == (commit, result["device"]):
            result = before
    known = {row["case"] for row in result["rows"]}
    for case in grid():
        if late():
            break
        if case.name not in known:
            result["rows"] += measure(case, asked, turns)
            torch.cuda.empty_cache()
            origin.write(path, result)


if __name__ == "__main__":
    main()
