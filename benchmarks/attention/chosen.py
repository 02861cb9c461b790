"""Checks and times the attention over chosen keys of `cuda_triton` on one GPU.

    python -m benchmarks.attention.chosen check [--seconds 40] [--seed 0]
    python -m benchmarks.attention.chosen time [--heads 128 16] [--rows 1 2 4 8] [--case 8x8192 64x4096] [--sweep]

`check` compares random batches in every mode with float64. `time` prints microseconds of one layer's `attend` over
lists of 2,048 random keys, next to the floor of bytes and products. A case's calls lie in one CUDA graph and read
disjoint rows, at least COLD_BYTES in total, so that L2 is cold. `--sweep` times other tile shapes and splits, too. Each
time is the smaller of two medians of graph replays. Results are also written as JSON to $OUT.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Form, Geometry, Limits, Mode, load
from draftmark.devices import device_profile
from draftmark_cuda_triton.compiled.prepare import store_kernels
from draftmark_cuda_triton.heuristics import chosen
from draftmark_cuda_triton.heuristics.common import KernelConfig, row_tiles
from draftmark_cuda_triton.kernel_list import EngineUse, kernels_of
from draftmark_cuda_triton.kernel_spec import KernelSpec
from draftmark_cuda_triton.launch.chosen import attend_chosen
from draftmark_cuda_triton.launch.operands import AttentionParams, ChosenOperands, PartialResults
from plugins.cuda_triton.tools.chosen_batches import ChosenProblem, draw_chosen
from plugins.cuda_triton.tools.latent_batches import Sizes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""Without a GPU, `check` runs small batches in the interpreter."""
COLD_BYTES = 150_000_000
BYTES_A_SECOND, FLOP_A_SECOND = 4.4e12, 790e12
"""Floors of an H200: what copies and large products reach."""
WIDTH = 2048
ROUNDOFF = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}
SWEEP = [
    *(KernelConfig(64, *one, 1) for one in ((32, 8, 3), (64, 8, 2), (32, 8, 2), (32, 4, 3))),
    *(KernelConfig(16, *one, 1) for one in ((32, 4, 3), (64, 4, 2), (64, 8, 3), (32, 8, 4))),
]
"""Tile shapes of rows of 576 bfloat16 elements that fit in shared memory."""
SPLITS = (1, 2, 3, 4, 6, 8, 16)


def shapes() -> list[AttentionShape]:
    """Return the shapes of `check`: rows of models, other rows, heads with K and V, caps, sinks and dtypes."""
    found = [
        *(_latent(heads, 512, rest, page) for heads, rest, page in (
            (128, 64, 64), (16, 64, 64), (20, 64, 16), (64, 0, 48), (5, 64, 1),
        )),
        _latent(12, 256, 64, 32, "float16"), _latent(20, 128, 32, 16, "float32"), _latent(32, 40, 9, 3),
        _latent(16, 512, 64, 64, kv="float8_e4m3fn"), _latent(96, 512, 64, 64, sinks=True),
        _latent(20, 512, 64, 64, logits_soft_cap=2.0), AttentionShape(32, 8, 128, 16), AttentionShape(8, 2, 64, 48),
        AttentionShape(12, 4, 192, 16, value_dim=128),
    ]  # fmt: skip
    widths = (WIDTH, 300, 64, 7)
    return [replace(shape, chosen_width=widths[number % len(widths)]) for number, shape in enumerate(found)]


def _latent(heads: int, value: int, rest: int, page: int, dtype: str = "bfloat16", kv: str = "", **more: Any) -> Any:
    fields = {"softmax_scale": 192**-0.5, "value_dim": value, "latent": True}
    return AttentionShape(heads, 1, value + rest, page, dtype, kv or dtype, **fields, **more)


def problems(seed: int, device: str) -> Iterator[ChosenProblem]:
    """Yield random batches without end, one shape after another."""
    every = shapes()
    while True:
        chance, shape = random.Random(seed), every[seed % len(every)]
        keys = chance.choice((40, 700, 3000)) if device == "cuda" else 60
        parts = shape.latent and shape.head_dim > shape.value_width and chance.random() < 0.2
        forms = (Form.LATENT_PARTS,) * parts + (Form.ENGINE_STORES,) * (chance.random() < 0.3)
        limits = {"batch_invariant": True} if chance.random() < 0.1 else {}
        yield draw_chosen(shape, chance.choice(list(Mode)), seed, device, Sizes(3, keys, 6), forms, **limits)
        seed += 1


def error_of(problem: ChosenProblem, device: str) -> str:
    """Return what is wrong with the outputs of a batch; empty if nothing is. Two runs give equal bits."""
    backend, batch = load("cuda_triton").open(problem.geometry, device), problem.batch
    backend.plan(batch)
    backend.write_metadata(batch)
    if Form.ENGINE_STORES not in problem.geometry.forms:
        backend.write_kv(problem.k, problem.v, problem.cache, batch)
    runs = []
    for _ in range(2):
        out, lse = problem.new_out()
        backend.attend(problem.q, problem.cache, batch, out, lse)
        runs.append((out, lse))
    if not all(torch.equal(one, other) for one, other in zip(*runs, strict=True)):
        return "two runs differ"
    out, lse = (one.cpu() for one in runs[0])
    if not out.isfinite().all() or lse.isnan().any():
        return "out is not finite, or lse is NaN"
    expected, expected_lse = problem.expected()
    found = out[: len(expected)].double()
    error = ((found - expected).norm() / expected.norm()).item()
    limit = ROUNDOFF[problem.geometry.attention.q_dtype]
    empty = expected_lse == float("-inf")
    by_lse = (lse[: len(expected)].double() - expected_lse)[~empty].abs().max().item()
    if not torch.equal(lse[: len(expected)] == float("-inf"), empty):
        return "lse of a row without keys is not -inf"
    return "" if error < limit and by_lse < 5 * limit else f"out errs by {error:.1e}, lse by {by_lse:.1e}"


def kernels() -> list[KernelSpec]:
    """Return the kernels of all shapes and modes, with log-sum-exps, in one buffer and in two."""
    found: dict[KernelSpec, None] = {}
    for shape in shapes():
        parts = [(), (Form.LATENT_PARTS,)] if shape.latent and shape.head_dim > shape.value_width else [()]
        for forms in parts:
            limits, draft = Limits(4, 4096, 32), DraftShape(2, 2, 6, 6)
            geometry = Geometry.create(shape, limits, draft, profile(), tuple(Mode), forms)
            found |= dict.fromkeys(kernels_of(geometry, use=EngineUse(lse=True), trees=False))
    return list(found)


def check(seconds: float, seed: int) -> dict[str, Any]:
    """Compare batches with float64 for `seconds`; return the numbers of batches and of wrong ones."""
    if DEVICE == "cuda":
        begin = time.monotonic()
        print(store_kernels(kernels(), lambda *_: None), f"{time.monotonic() - begin:.0f} s", flush=True)
    begin, wrong, count = time.monotonic(), 0, 0
    for count, problem in enumerate(problems(seed, DEVICE), 1):
        try:
            error = error_of(problem, DEVICE)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        if error:
            wrong += 1
            a = problem.geometry.attention
            print(f"WRONG seed {seed + count - 1}: {error}: {problem.batch.mode.value} {a}", flush=True)
        if time.monotonic() - begin > seconds or wrong > 10:
            break
    print(f"{count} batches of {len(shapes())} shapes, {wrong} wrong, on {DEVICE}", flush=True)
    return {"batches": count, "wrong": wrong}


class Timed:
    """Holds a case on the GPU: caches of several calls, queries, and lists of random keys of each request."""

    def __init__(self, heads: int, requests: int, keys: int, rows: int) -> None:
        shape = replace(_latent(heads, 512, 64, 64), chosen_width=WIDTH)
        limits, draft = Limits(requests, keys, 64), DraftShape(1, 1, rows)
        self.geometry = Geometry.create(shape, limits, draft, profile(), (Mode.VERIFY,))
        self.rows, per_call = requests * rows, requests * keys * 1152
        self.calls = max(1, -(-COLD_BYTES // per_call))
        pages = requests * keys // 64
        dice = torch.Generator(device=DEVICE).manual_seed(0)
        self.pools = [
            torch.randn(pages, 64, 1, 576, device=DEVICE, generator=dice).bfloat16() for _ in range(self.calls)
        ]
        self.q = torch.randn(self.rows, heads, 576, device=DEVICE, generator=dice).bfloat16()
        self.out = torch.empty(self.rows, heads, 512, device=DEVICE, dtype=torch.bfloat16)
        order = torch.rand(self.rows, keys, device=DEVICE, generator=dice).argsort(1)[:, :WIDTH]
        start = torch.arange(requests, device=DEVICE).repeat_interleave(rows)[:, None] * keys
        self.slots = (order + start).int().contiguous()
        self.counts = torch.full((self.rows,), WIDTH, dtype=torch.int32, device=DEVICE)
        self.indptr = (torch.arange(requests + 1, device=DEVICE) * rows).int()
        self.params = AttentionParams.from_geometry(self.geometry, True)
        read = min(requests * keys, self.rows * WIDTH) * 1152 + self.rows * heads * (576 + 512) * 2
        self.floor_us = 1e6 * max(read / BYTES_A_SECOND, 2 * self.rows * heads * WIDTH * 1088 / FLOP_A_SECOND)

    def launch(self, config: KernelConfig, splits: int) -> Callable[[], None]:
        """Return a function that runs one call per pool."""
        a = self.geometry.attention
        size = self.rows * splits * row_tiles(config, 1, a.num_qo_heads) * config.block_m if splits > 1 else 1
        partial = torch.empty(size, 512, device=DEVICE), torch.empty(size, device=DEVICE)
        partials = PartialResults(self.indptr, *partial)

        def run() -> None:
            for pool in self.pools:
                operands = ChosenOperands(
                    self.q, pool[..., :512], pool[..., 512:], None, None, None, self.out, None, self.slots, self.counts,
                    self.indptr,
                )  # fmt: skip
                attend_chosen(self.params, config, splits, operands, partials)

        return run

    def error(self) -> float:
        """Return the relative error of the last call's first row against float64."""
        keys = self.pools[-1].view(-1, 576)[self.slots[0].long()].double()
        scores = self.q[0].double() @ keys.T * self.params.scale
        want = scores.softmax(-1) @ keys[:, :512]
        return float((self.out[0].double() - want).norm() / want.norm())

    def microseconds(self, config: KernelConfig, splits: int, replays: int) -> float:
        """Return the time of one call: the smaller of two medians of graph replays."""
        run = self.launch(config, splits)
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        found: list[float] = []
        for _ in range(2):
            times: list[float] = []
            for _ in range(replays):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1e3 / self.calls)
            found.append(float(median(times)))
        return min(found)


def profile() -> DeviceProfile:
    """Return the GPU's profile; an H200's without a GPU."""
    return device_profile("cuda") if DEVICE == "cuda" else DeviceProfile("cuda", 90, 132)


def time_cases(
    heads: list[int], rows: list[int], cases: list[str], sweep: bool, seconds: float
) -> list[dict[str, Any]]:
    """Time every case with the plugin's own choice, and with `sweep` other choices until `seconds` have passed."""
    begin, found = time.monotonic(), list[dict[str, Any]]()
    print(
        f"{'heads':>5} {'case':>9} {'rows':>4} {'floor':>7} {'ours':>8} {'ratio':>6} {'error':>8}  choice", flush=True
    )
    timed_cases = [(h, r, c) for h, c, r in product(heads, cases, rows)]
    for count, (h, r, case) in enumerate(timed_cases):
        requests, keys = map(int, case.split("x"))
        timed = Timed(h, requests, keys, r)
        own = chosen.chosen_config(timed.geometry.attention, timed.geometry.device)
        splits = chosen.num_splits(timed.geometry, Mode.VERIFY, timed.rows)
        us = timed.microseconds(own, splits, 20)
        error = timed.error()
        row: dict[str, Any] = {
            "heads": h, "case": case, "rows": r, "floor_us": timed.floor_us, "us": us, "error": error,
            "config": asdict(own), "splits": splits, "sweep": [],
        }  # fmt: skip
        choice = f"{own.block_m}x{own.block_n} w{own.num_warps} s{own.num_stages} splits {splits}"
        print(
            f"{h:5} {case:>9} {r:4} {timed.floor_us:7.1f} {us:8.1f} {us / timed.floor_us:6.2f} {error:8.1e}  {choice}",
            flush=True,
        )
        tiles = [one for one in SWEEP if (one.block_m == 64) == (h > 32)]
        for config, parts in product(tiles, SPLITS) if sweep else ():
            ctas = timed.rows * row_tiles(config, 1, h) * parts
            share = seconds * (count + 1) / len(timed_cases)
            if (parts > 1 and ctas > 8 * 132) or time.monotonic() - begin > share:
                continue
            try:
                us = timed.microseconds(config, parts, 7)
            except Exception as failure:
                print(f"      {config.block_m}x{config.block_n}: {str(failure)[:90]}", flush=True)
                continue
            row["sweep"].append([config.block_m, config.block_n, config.num_warps, config.num_stages, parts, us])
        best = sorted(row["sweep"], key=lambda one: one[-1])[:4]
        for m, n, w, s, parts, us in best:
            print(f"      {m}x{n} w{w} s{s} splits {parts}: {us:.1f}", flush=True)
        found.append(row)
        del timed
    return found


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "time"))
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", type=int, nargs="+", default=[128, 16])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--case", nargs="+", default=["8x8192", "64x4096"])
    parser.add_argument("--sweep", action="store_true")
    given = parser.parse_args()
    os.environ["DRAFTMARK_PREPARE"] = "0"  # each kernel compiles when it is launched
    result: Any
    if given.command == "check":
        result = check(given.seconds, given.seed)
    else:
        result = time_cases(given.heads, given.rows, given.case, given.sweep, given.seconds)
    if os.environ.get("OUT"):
        Path(os.environ["OUT"], f"chosen-{given.command}.json").write_text(json.dumps(result))
    raise SystemExit(given.command == "check" and result["wrong"] > 0)


if __name__ == "__main__":
    main()
