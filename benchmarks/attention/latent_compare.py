"""Times latent rows (MLA) of `cuda_triton` next to other libraries on one GPU, in interleaved rounds.

    python -m benchmarks.attention.latent_compare --groups 128,16/1,8,32/64 128/4/16 [--case 64x4096 …] [--json FILE]

A group names heads, rows and pages; every combination of it runs in every `--case`. Every output is compared with
float64. A tree of this backend runs next to a chain with the same number of rows, because no peer has a tree mask.
Results are written after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftmark_cuda_triton.compiled.prepare import store_kernels
from draftmark_cuda_triton.kernel_list import kernels_of
from draftmark_cuda_triton.kernel_spec import KernelSpec
from plugins.cuda_triton.tools.latent_fuzz import PORTABLE

from .latent_cases import Calls, Case, Timed, captured, replay_time
from .latent_peers import PEERS
from .stubs import Absent

MAX_ERROR = 4e-3
"""Relative error of a result that rounds the weights to bfloat16 once."""
OURS = "cuda_triton"


def compare(given: argparse.Namespace) -> None:
    """Time this backend and its peers, print one line for each case, and write JSON rows."""
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    specs = dict.fromkeys(spec for case in cases(given) for spec in _kernels(case))
    print(store_kernels(list(specs), lambda *_: None), f"{time.monotonic() - begin:.0f} s", flush=True)
    for case in cases(given):
        if time.monotonic() - begin > given.seconds:
            print(f"stopped before {case}", flush=True)
            break
        rows += compare_case(case, given)
        torch.cuda.empty_cache()
        if given.json:
            Path(given.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _kernels(case: Case) -> list[KernelSpec]:
    """Return the kernels that a case launches: the portable kernel only if it has no other."""
    found = kernels_of(case.geometry(), trees=False)
    own = [one for one in found if one.kernel.__name__ != PORTABLE]
    return own if any(one.kernel.__name__.startswith("attend") for one in own) else found


def compare_case(case: Case, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Time one case, print it, and return a row for each backend."""
    timed = Timed(case)
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, Calls]] = {}
    errors: dict[str, float] = {}
    for name, make in {OURS: Timed.own_calls, **{one: PEERS[one] for one in given.peers}}.items():
        try:
            calls = make(timed)
            errors[name] = timed.error_of(calls[0](), chain=name != OURS)
            graphs[name] = captured(calls), calls
        except (Absent, RuntimeError, TypeError) as error:
            if name == OURS or not isinstance(error, Absent):
                print(f"{case}: {name} is absent: {type(error).__name__} {str(error)[:120]}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(given.rounds):
        for name, (graph, _calls) in graphs.items():
            times[name].append(replay_time(graph, given.replays) / timed.calls)
    _show(case, times, errors)
    return [_row(case, name, times, errors[name]) for name in graphs]


def _row(case: Case, name: str, times: dict[str, list[float]], error: float) -> dict[str, Any]:
    """Return the result of one backend in one case."""
    us = times[name]
    return {
        "case": case.name, "heads": case.heads, "value_dim": case.value_dim, "rest_dim": case.rest_dim,
        "page_size": case.page, "kv_dtype": case.kv_dtype, "backend": name, "us": round(median(us), 2),
        "us_range": [round(min(us), 2), round(max(us), 2)], "exact": error < MAX_ERROR, "error": float(f"{error:.2e}"),
        "floor_us": round(max(case.floors), 2), **(_ratio(times) if name == OURS else {}),
    }  # fmt: skip


def _ratio(times: dict[str, list[float]]) -> dict[str, Any]:
    """Return the speed of this backend over the best peer of each round, higher is faster: median and range."""
    others = [us for name, us in times.items() if name != OURS]
    if not others:
        return {}
    ratios = [min(found) / ours for ours, *found in zip(times[OURS], *others, strict=True)]
    return {
        "speed_over_best": round(median(ratios), 3), "speed_range": [round(min(ratios), 3), round(max(ratios), 3)],
    }  # fmt: skip


def _show(case: Case, times: dict[str, list[float]], errors: dict[str, float]) -> None:
    found = " ".join(f"{name} {median(us):.1f}" for name, us in times.items())
    ratio = _ratio(times) if OURS in times else {}
    wrong = [name for name, error in errors.items() if not error < MAX_ERROR]
    print(
        f"{case.heads:3} {case.value_dim}+{case.rest_dim} {case.kv_dtype[:5]} p{case.page:<2} {case.name:>16}: "
        f"{found}; floor {max(case.floors):.1f} speed {ratio.get('speed_over_best')} {ratio.get('speed_range', '')}"
        f"{f' INEXACT {wrong}' if wrong else ''}", flush=True,
    )  # fmt: skip


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases that the command line names, group by group."""
    value_dim, rest_dim = map(int, given.parts.split("+"))
    for group in given.groups:
        heads, rows, pages = (tuple(map(int, one.split(","))) for one in group.split("/"))
        for page, row, head, name in product(pages, rows, heads, given.case):
            requests, keys = map(int, name.split("x"))
            yield Case(head, requests, keys, row, page, value_dim, rest_dim, given.kv_dtype)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", default=["128,16/1,4,32/64"])
    parser.add_argument("--case", nargs="+", default=["64x4096", "16x32768", "8x8192", "1x65536", "1x1024"])
    parser.add_argument("--parts", default="512+64", help="elements of the value part and of the rest")
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--replays", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--json")
    os.environ["DRAFTMARK_PREPARE"] = "0"  # opening a backend would compile kernels that nothing launches here
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
