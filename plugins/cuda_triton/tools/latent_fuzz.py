"""Fuzz of the Hopper kernels for latent rows: random batches on a GPU against float64.

    python -m plugins.cuda_triton.tools.latent_fuzz [--batches 1000] [--seconds 60] [--seed 0] [--shapes 60]
        [--processes 1]

Each batch has one of SHAPES, a random mode, tree, lengths, pages and number of SMs, so that splits are short and long.
Outputs start as NaN, unwritten KV slots are NaN, and a second run must give the same bits. The float64 results come
from the GPU. The command stops at `--seconds`, prints every wrong batch, and exits with 1 if there is one. Processes
share the GPU and divide the batches, because a batch takes more time on the CPU.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Form, Geometry, Limits, Mode, load
from draftmark_cuda_triton.compiled.prepare import store_kernels
from draftmark_cuda_triton.heuristics import latent
from draftmark_cuda_triton.kernel_list import EngineUse, kernels_of
from draftmark_cuda_triton.kernel_spec import KernelSpec

from .latent_batches import Problem, Sizes, draw

MODES = (Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY, Mode.DRAFT, Mode.DRAFT_BLOCK, Mode.DRAFT_EXTEND)
NUM_SMS = (1, 2, 5, 16, 132)
"""Numbers of SMs that geometries declare. Few give long splits and the kernel with q in registers, many give short
splits and the kernel with q in shared memory."""
NUM_SHAPES = 60
SCALE = 192**-0.5
"""Softmax scale of most shapes. With another one, q is drawn larger or smaller, so that scores are alike."""
E4M3 = "float8_e4m3fn"
PORTABLE = "attend_decode_verify"
"""Kernel for tensors that TMA cannot load, which no batch here has."""
MAX_ERROR, MAX_ROW_ERROR, MAX_LSE_ERROR = 4e-3, 2e-2, 2e-2
"""Largest relative errors of out by norm, of all rows and of one row, and largest error of a log-sum-exp."""


def shapes(count: int = NUM_SHAPES) -> list[AttentionShape]:
    """Return the shapes: windows, caps, sinks, float16, e4m3 and each page size, then every pair of heads and parts."""
    found = [_shape(h, 512, 64, page) for h, page in zip((128, 20, 16, 12, 96), (8, 48, 128, 32, 24), strict=True)]
    found += [_shape(20, 128, 32, 16), _shape(40, 256, 32, 48), _shape(128, 512, 64, 64, "float16")]
    found += [_shape(12, 512, 64, 64, window_left=100), _shape(128, 512, 64, 16, sinks=True)]
    found += [_shape(16, 512, 64, 64, logits_soft_cap=3.0), _shape(32, 512, 64, 8, window_left=30)]
    e4m3 = (
        (128, 512, 64, 64), (16, 512, 64, 16), (20, 256, 64, 48), (40, 128, 32, 64), (64, 512, 0, 8), (20, 512, 64, 8),
        (5, 512, 64, 24), (12, 256, 0, 16), (16, 512, 32, 64), (1, 512, 64, 128), (40, 256, 32, 48),
    )  # fmt: skip
    found += [_shape(*one, kv_dtype=E4M3) for one in e4m3]
    found += [
        _shape(12, 512, 64, 64, kv_dtype=E4M3, window_left=100), _shape(96, 512, 64, 32, kv_dtype=E4M3, sinks=True),
        _shape(16, 512, 64, 64, "float16", kv_dtype=E4M3, logits_soft_cap=3.0),
        _shape(32, 512, 64, 8, kv_dtype=E4M3, window_left=30),
        _shape(16, 256, 64, 16, "float16", kv_dtype=E4M3, sinks=True, logits_soft_cap=3.0),
        # q beyond the range of float16
        _shape(128, 512, 64, 64, kv_dtype=E4M3, softmax_scale=SCALE * 2**-18),
        _shape(20, 256, 64, 16, kv_dtype=E4M3, softmax_scale=SCALE * 2**24),
    ]  # fmt: skip
    heads, parts = (128, 96, 64, 40, 32, 20, 16, 12, 5, 1), ((512, 64), (512, 0), (256, 64))
    pages = (64, 16)
    found += [_shape(h, *part, pages[n % 2]) for n, (h, part) in enumerate(product(heads, parts))]
    return found[:count]


def _shape(
    heads: int, value: int, rest: int, page: int, dtype: str = "bfloat16", kv_dtype: str = "",
    softmax_scale: float = SCALE, **fields,
) -> AttentionShape:  # fmt: skip
    return AttentionShape(
        heads, 1, value + rest, page, dtype, kv_dtype or dtype, softmax_scale=softmax_scale, value_dim=value,
        latent=True, **fields,
    )  # fmt: skip


def problems(seed: int, device: str, count: int = NUM_SHAPES) -> Iterator[Problem]:
    """Yield random batches of the first `count` shapes without end, one shape after another."""
    every = shapes(count)
    while True:
        chance = random.Random(seed)
        shape = every[seed % len(every)]
        sizes = Sizes(5, chance.choice((70, 300, 1200)), chance.choice((4, 33)))
        if shape.num_qo_heads >= 64:
            sizes = Sizes(3, sizes.keys, min(sizes.rows, 17))
        forms = (Form.ENGINE_STORES,)
        if shape.head_dim > shape.value_width and chance.random() < 0.2:
            forms += (Form.LATENT_PARTS,)
        limits = {"batch_invariant": True} if chance.random() < 0.1 else {}
        found = draw(shape, chance.choice(MODES), seed, device, sizes, forms, **limits)
        found.q *= SCALE / (shape.softmax_scale or SCALE)
        if shape.kv_dtype == shape.q_dtype and chance.random() < 0.1:
            # Rows of q with two pitches, which TMA cannot load
            found.q = torch.cat((found.q, found.q[:, :1]), 1)[:, :-1]
        profile = replace(found.geometry.device, num_sms=chance.choice(NUM_SMS))
        found.geometry = replace(found.geometry, device=profile)
        yield found
        seed += 1


def kernels(count: int = NUM_SHAPES) -> list[KernelSpec]:
    """Return the kernels of the first `count` shapes, with log-sum-exps, for causal, tree and block tails."""
    found: dict[KernelSpec, None] = {}
    # No kernel is compiled for a number of heads, except for one head. 20 heads have requests of one row tile and more.
    # Over e4m3, 5 heads have the small row tiles.
    kinds = dict.fromkeys(replace(one, num_qo_heads=1 if one.num_qo_heads == 1 else 20) for one in shapes(count))
    kinds |= dict.fromkeys(
        replace(one, num_qo_heads=5) for one in kinds if one.kv_dtype == E4M3 if one.num_qo_heads > 1
    )
    for shape, trees, sms in product(kinds, (False, True), (NUM_SMS[0], NUM_SMS[-1])):
        geometry = Geometry.create(
            shape, Limits(3, 2000, 16, row_budgets=(16,)), DraftShape(2, 2, 4, 4), DeviceProfile("cuda", 90, sms),
            MODES, (Form.ENGINE_STORES,),
        )  # fmt: skip
        own = kernels_of(geometry, 90, EngineUse(lse=True, tree_tails=trees), trees=False)
        found |= dict.fromkeys(one for one in own if _stores_lse(one) and one.kernel.__name__ != PORTABLE)
    return list(found)


def _stores_lse(spec: KernelSpec) -> bool:
    """Check whether a kernel stores log-sum-exps; True for kernels without that choice."""
    names = spec.kernel.arg_names
    return "WITH_LSE" not in names or dict(spec.constexprs)[names.index("WITH_LSE"),]


def error_of(problem: Problem, device: str) -> str:
    """Return what is wrong with the outputs of a batch; empty if nothing is."""
    backend, batch = load("cuda_triton").open(problem.geometry, device), problem.batch
    backend.plan(batch)
    backend.write_metadata(batch)
    runs = []
    for _ in range(2):
        out, lse = problem.new_out()
        backend.attend(problem.q, problem.cache, batch, out, lse)
        runs.append((out, lse))
    (out, lse), again = runs
    expected, expected_lse = problem.expected(device)
    live = len(expected)
    if not out.isfinite().all() or lse.isnan().any():
        return (
            f"{(~out.isfinite()).sum().item()} elements of out are not finite, {lse.isnan().sum().item()} lse are NaN"
        )
    if not all(torch.equal(one, other) for one, other in zip(runs[0], again, strict=True)):
        return "two runs differ"
    found = out[:live].double()
    norm = expected.norm()
    error = ((found - expected).norm() / norm).item() if norm > 0 else found.norm().item()
    by_row = ((found - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-3)).max().item()
    by_lse = (lse[:live].double() - expected_lse).nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    if error < MAX_ERROR and by_row < MAX_ROW_ERROR and by_lse < MAX_LSE_ERROR:
        return ""
    return f"out errs by {error:.1e}, its worst row by {by_row:.1e}, lse by {by_lse:.1e}"


def describe(problem: Problem) -> str:
    """Return a line that names shape and batch."""
    a, batch = problem.geometry.attention, problem.batch
    rows = [(one.prefix, one.tail, one.rows) for one in problem.requests]
    return (
        f"{a.num_qo_heads} heads {a.value_width}+{a.head_dim - a.value_width} page {a.page_size} {a.q_dtype} "
        f"{a.kv_dtype} window {a.window_left} cap {a.logits_soft_cap} sinks {a.sinks:d} {batch.mode.value} "
        f"{type(batch.tail).__name__} {problem.geometry.device.num_sms} SMs, (prefix, tail, rows) {rows}"
    )


def fuzz(batches: int, seconds: float, seed: int, device: str = "cuda", shape_count: int = NUM_SHAPES) -> int:
    """Compare batches with float64, print a summary, and return the number of wrong ones."""
    return _show(_compare(batches, seconds, seed, device, shape_count), shape_count)


def fuzz_in_processes(processes: int, batches: int, seconds: float, seed: int, shape_count: int) -> int:
    """Divide the batches of `fuzz` among processes."""
    share = -(-batches // processes)
    given = [(share, seconds, seed + n * share, "cuda", shape_count) for n in range(processes)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.starmap(_compare, given)
    counts, kinds, wrong = zip(*found, strict=True)
    return _show((sum(counts), set().union(*kinds), sum(wrong)), shape_count)


def _show(found: tuple[int, set[tuple], int], shape_count: int) -> int:
    count, kinds, wrong = found
    print(f"{count} batches of {len(shapes(shape_count))} shapes and {len(kinds)} kinds, {wrong} wrong", flush=True)
    return wrong


def _compare(batches: int, seconds: float, seed: int, device: str, shape_count: int) -> tuple[int, set[tuple], int]:
    """Compare batches; return their number, their kinds, and the number of wrong ones."""
    os.environ["DRAFTMARK_PREPARE"] = "0"  # kernels of all batches are compiled before
    torch.set_num_threads(1)
    begin, wrong, count, kinds = time.monotonic(), 0, 0, set()
    for count, problem in enumerate(problems(seed, device, shape_count), 1):
        error = error_of(problem, device)
        a = problem.geometry.attention
        kinds.add((a.num_qo_heads, a.value_width, a.head_dim, a.page_size, a.kv_dtype, problem.batch.mode))
        if error:
            wrong += 1
            print(f"WRONG seed {seed + count - 1}: {error}: {describe(problem)}", flush=True)
        if count == batches or time.monotonic() - begin > seconds or wrong > 20:
            break
    return count, kinds, wrong


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shapes", type=int, default=NUM_SHAPES)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    os.environ["DRAFTMARK_PREPARE"] = "0"  # kernels of all batches are compiled at once
    begin = time.monotonic()
    assert not any(latent.reasons_against_sm90(one, draw(one, Mode.DECODE, 0).geometry.device) for one in shapes())
    print(store_kernels(kernels(given.shapes), lambda *_: None), f"{time.monotonic() - begin:.0f} s", flush=True)
    if given.processes > 1:
        wrong = fuzz_in_processes(given.processes, given.batches, given.seconds, given.seed, given.shapes)
    else:
        wrong = fuzz(given.batches, given.seconds, given.seed, shape_count=given.shapes)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
