"""Attention of draftmark's CUDA plugins beside every peer that can be run here, on one GPU, in one process.

    python -m benchmarks.attention --json benchmarks/results/attention-h200.json [--case NAME …] [--backend NAME …]

A run of some backends joins the file of a run of all with `--append`, under `later_runs`, with a commit of its own.

Every answer is checked against float64 before it is timed. A time is the median of CUDA-graph replays, after a
tenth of a second of them; calls rotate through KV sets larger than L2 together. Schedules and plans are made before
the timed calls, for peers too; `metadata-256` times ours. TB/s counts K and V once.
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from benchmarks import origin
from draftmark_contract.cli.measuring import relative_error

from . import stubs
from .cases import CASES, Case, Inputs, build, clear_unused, microseconds, reference
from .ours import OURS, memory_rows, metadata_rows, ours
from .peers import Peer, backends
from .stock import key_rows, plan_rows
from .stubs import Absent

TOLERANCE = 1e-2


def measure(case: Case, names: set[str] | None) -> list[dict]:
    """One row per backend of one case."""
    inputs = build(case)
    plugins = {name: partial(ours, plugin) for name, plugin in OURS.items()}
    asked: dict[str, Callable[[Inputs], Peer]] = {**plugins, **backends(case.name)}
    expected: dict[str, torch.Tensor] = {}
    rows = []
    for name, make in asked.items():
        if names and name not in names:
            continue
        if name not in OURS:
            clear_unused(inputs)  # peers may read what no token occupies; ours must not mind it
        try:
            peer = make(inputs)
            peer.calls[0]()
            torch.cuda.synchronize()
            if peer.tail not in expected:
                clean = tuple(cache.nan_to_num(0.0) for cache in inputs.caches[0])
                expected[peer.tail] = reference(inputs, clean, peer.tail)
            worst = relative_error(peer.outs[0], expected[peer.tail])
            if not worst < TOLERANCE:
                rows.append(_row(case, name, None, worst, peer.tail, "wrong answer, not timed"))
            else:
                rows.append(_row(case, name, microseconds(peer.calls), worst, peer.tail, peer.note))
        except Absent as absent:
            rows.append(_row(case, name, None, None, "", str(absent)))
        except Exception as failure:  # a peer's own; ours must not fail
            if name in OURS:
                raise
            told = " ".join(str(failure).split())[:300]
            rows.append(_row(case, name, None, None, "", f"failed: {type(failure).__name__}: {told}"))
        peer = None
        print(_line(rows[-1]), flush=True)
    return rows


def _row(case: Case, name: str, us: float | None, worst: float | None, tail: str, note: str) -> dict:
    rate = case.kv_bytes / us / 1e6 if us else None
    return {
        "case": case.name, "backend": name, "us": us, "tb_per_s": rate, "max_err": worst,
        "checked": worst is not None and worst < TOLERANCE, "tail": tail, "note": note,
    }  # fmt: skip


def _line(row: dict) -> str:
    if row["us"] is None:
        return f"{row['case']:18} {row['backend']:16} absent: {row['note']}"
    return (
        f"{row['case']:18} {row['backend']:16} {row['us']:8.1f} us {row['tb_per_s']:5.2f} TB/s "
        f"error {row['max_err']:.1e}  tail {row['tail']}"
    )


def versions() -> dict[str, str]:
    """What was measured, by distribution."""
    found = {"python": sys.version.split()[0], "cuda": torch.version.cuda or ""}
    for name in ("torch", "triton", "flashinfer-python", "draftmark"):
        try:
            found[name] = md.version(name)
        except md.PackageNotFoundError:
            found[name] = "absent"
    return found | stubs.versions()


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs="*")
    parser.add_argument("--backend", nargs="*")
    parser.add_argument("--append", action="store_true", help="keep the file's run, add this one to its later_runs")
    parser.add_argument("--commit", default="", help="recorded as is; by default asked of git")
    args = parser.parse_args()
    if args.append and not (args.json and args.json.is_file()):
        parser.error(f"--append adds to a file, but --json is {args.json}; name one that a run of all has written")
    commit = args.commit or origin.commit()
    metadata, memory = ([], []) if args.case else (metadata_rows() + plan_rows(), memory_rows() + key_rows())
    rows = []
    for case in CASES:
        if not args.case or case.name in args.case:
            rows += measure(case, set(args.backend) if args.backend else None)
            torch.cuda.empty_cache()
    result = {
        "schema": 1, "commit": commit, "device": torch.cuda.get_device_name(), "versions": versions(), "rows": rows,
        "metadata": metadata, "graph_state": memory,
    }  # fmt: skip
    if args.json:
        if args.append:
            first = json.loads(args.json.read_text(encoding="utf-8"))
            asked = {row["backend"] for row in rows}
            kept = [run for run in first.get("later_runs", []) if {row["backend"] for row in run["rows"]} != asked]
            result = first | {"later_runs": [*kept, result]}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
