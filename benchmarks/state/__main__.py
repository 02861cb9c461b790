"""Times layers with recurrent state on one GPU: draftmark's `cuda_triton` next to other libraries, in one process.

    python -m benchmarks.state --json benchmarks/results/state-h200.json [--case NAME …] [--layer NAME …] [--warm]

A row is one layer's share of a call: `recur` of every layer, and for a verify the commit of all layers. The convolution
is left out. Outputs of two requests, and their slots after the accepted rows, are compared with float64 before timing.
A time is the median of several turns; backends alternate in the turns, and each turn replays CUDA graphs. `floor_us` is
the bytes that the backend's scheme must move, at the copy rate measured in the same run. `held_bytes` is what
speculation holds next to the slots. Other libraries come from the folder that `carry` makes; they may autotune.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import origin
from benchmarks.attention.measuring import WARM_TURNS, turn_of

from . import stubs, warming
from .cases import LAYERS, Case, cases
from .inputs import Expected, draw, expected
from .ours import Runner, ours
from .peers import peers

TOLERANCE = 2e-2
TURNS = 15
COPY_BYTES = 1 << 31
MODES = ["decode", "chain", "tree", "extend"]
Row = dict[str, Any]


def copy_rate() -> float:
    """Return the bytes a second that a kernel reads and writes when it copies a large tensor.

    A graph copies through the copy engine, which is slower, so the kernel negates.
    """
    source = torch.randn(COPY_BYTES // 4, device="cuda")
    target = torch.empty_like(source)
    take = turn_of([lambda: torch.neg(source, out=target)])
    return 2 * COPY_BYTES / median(take() for _ in range(9)) * 1e6


def measure(case: Case, names: Iterable[str] | None, turns: int, rate: float) -> list[Row]:
    """Return one row for each backend of a case."""
    layers = [draw(case, seed) for seed in range(case.layers)]
    correct = expected(case, layers[0])
    makers: dict[str, Callable[..., Runner]] = {warming.OURS: ours, **peers(case)}
    rows, timed = [], []
    for name, make in makers.items():
        if names and name not in names:
            continue
        row = _row(case, name)
        rows.append(row)
        try:
            runner = make(case, layers)
            _check(case, row, runner, correct)
            if turns and right(row):
                with torch.inference_mode():
                    take = turn_of([runner.call])
                timed.append((row, runner, take))
        except stubs.Absent as absent:
            row["note"] = str(absent)
        except Exception as failure:
            row["note"] = f"failed: {type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
    for turn in range(WARM_TURNS + turns):
        for row, _, take in timed if turn % 2 == 0 else timed[::-1]:
            us = take() / case.layers
            if turn >= WARM_TURNS:
                row["turns"].append(round(us, 3))
    for row, runner, _ in timed:
        row |= {"us": median(row["turns"]), "bytes": case.bytes_of(runner.moved), "held_bytes": runner.held_bytes}
        row["floor_us"] = round(row["bytes"] / rate * 1e6, 3)
        if case.nodes:
            row["states_moved"] = round(row["us"] * rate / 1e6 / case.all_states, 3)
    for row in rows:
        print(_line(row), flush=True)
    return rows


def _check(case: Case, row: Row, runner: Runner, correct: Expected) -> None:
    """Run the case once from fresh slots and write its error to the row."""
    runner.reset()
    with torch.inference_mode():
        runner.call()
    torch.cuda.synchronize()
    states = None if runner.states is None else runner.states()
    error = correct.error(case, runner.out(), states)
    note = runner.note if error < TOLERANCE else f"wrong answer ({error:.1e}), not timed"
    row |= {"exact": error if math.isfinite(error) else None, "note": note}


def _row(case: Case, backend: str) -> Row:
    return {
        "case": case.name, "layer": case.layer.name, "backend": backend, "rows": sum(case.rows),
        "requests": case.requests, "us": None, "turns": [], "bytes": None, "floor_us": None, "states_moved": None,
        "exact": None, "held_bytes": None, "note": "",
    }  # fmt: skip


def _line(row: Row) -> str:
    name = f"{row['layer']:7} {row['case']:16} {row['backend']:17}"
    if row["us"] is None:
        error = "" if row["exact"] is None else f"error {row['exact']:.1e} "
        return f"{name} not timed: {error}{row['note'][:150]}"
    spread = f"{min(row['turns']):.1f}-{max(row['turns']):.1f}"
    moved = "" if row["states_moved"] is None else f"{row['states_moved']:6.2f} S "
    return (
        f"{name} {row['us']:9.1f} us ({spread}) floor {row['floor_us']:8.1f}  {moved}"
        f"error {row['exact']:.1e} held {row['held_bytes'] / 2**30:.2f} GiB"
    )


def main() -> None:
    """Measure the selected cases and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--case", nargs="*", default=[])
    parser.add_argument("--layer", nargs="*", default=[*LAYERS])
    parser.add_argument("--backend", nargs="*")
    parser.add_argument("--requests", type=int, default=64, help="requests of decode and verify cases")
    parser.add_argument("--turns", type=int, default=TURNS, help="timed turns of each backend; 0 only checks outputs")
    parser.add_argument("--mode", nargs="*", default=MODES, choices=MODES)
    parser.add_argument("--warm", action="store_true", help="compile the kernels first, in parallel")
    parser.add_argument("--tuning-part", default="0/1", help="of --warm: the configurations that this process compiles")
    parser.add_argument("--commit", default="", help="commit to record; by default git's HEAD")
    args = parser.parse_args()
    wanted = [
        one
        for one in cases(args.requests)
        if one.layer.name in args.layer and one.mode in args.mode and (not args.case or one.name in args.case)
    ]
    if not wanted:
        names = sorted({one.name for one in cases(args.requests)})
        parser.error(f"no case of mode {args.mode} is named {args.case}; the names are {names}")
    os.environ["DRAFTMARK_PREPARE"] = "0"  # opening a backend would compile kernels that no case launches
    if args.warm:
        warming.warm(wanted, args.requests, args.backend)
    warming.shorten_tuning(args.tuning_part)
    rate, rows = copy_rate() if args.turns else math.inf, list[Row]()
    result = {
        "schema": 1, "commit": args.commit or origin.commit(), "device": torch.cuda.get_device_name(),
        "versions": origin.versions("torch", "triton", "draftmark") | stubs.versions(), "copy_tb_per_s": rate / 1e12,
        "rows": rows,
    }  # fmt: skip
    for case in wanted:
        rows += measure(case, args.backend, args.turns, rate)
        torch.cuda.empty_cache()
        origin.write(args.json, result)
    wrong = [row["case"] for row in rows if row["backend"] == warming.OURS and not right(row)]
    if wrong:
        raise SystemExit(f"draftmark failed or was wrong in {wrong}")


def right(row: Row) -> bool:
    """Check whether a row's outputs were close to float64."""
    return row["exact"] is not None and row["exact"] < TOLERANCE


if __name__ == "__main__":
    main()
