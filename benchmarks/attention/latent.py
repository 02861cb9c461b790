"""Checks and times the latent rows (MLA) of `cuda_triton` on one GPU.

    python -m benchmarks.attention.latent check [--shapes 42] [--batches 5] [--seed 0]
    python -m benchmarks.attention.latent time [--heads 128 16] [--rows 1 4 32] [--pages 64 16] [--case 64x4096 …]
    python -m benchmarks.attention.latent sweep [--heads 128 16] [--rows 1 4 32] [--case 64x4096]

`check` compares random batches of random shapes with float64: outputs, log-sum-exps and stored rows. `time` prints
microseconds of one layer's `attend` next to the floor of bytes and products. A case's calls lie in one CUDA graph and
read disjoint random pages (`latent_cases.COLD_BYTES`), so that L2 is cold. 32 rows are trees. `sweep` times other tile
shapes of the portable kernel. Each time is the smaller of two medians of graph replays. `latent_compare` times this
backend next to others.
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterable, Iterator
from itertools import product

from draftmark import AttentionShape, Form, Geometry, Mode, load
from draftmark_cuda_triton.compiled.prepare import store_kernels
from draftmark_cuda_triton.heuristics import latent as latent_heuristics
from draftmark_cuda_triton.heuristics import select
from draftmark_cuda_triton.heuristics.common import KernelConfig
from draftmark_cuda_triton.kernel_list import EngineUse, kernels_of
from draftmark_cuda_triton.kernel_spec import KernelSpec
from plugins.cuda_triton.tools.latent_batches import Problem, Sizes, draw

from .latent_cases import DEVICE, Case, Timed

ROUNDOFF = {"bfloat16": 4e-3, "float16": 1e-3, "float32": 1e-5}
CASES = ("1x1024", "8x8192", "64x4096", "16x32768")
SWEEP = [
    *(KernelConfig(16, n, warps, stages, ctas) for n, warps, stages, ctas in (
        (32, 4, 3, 2), (32, 4, 4, 1), (64, 4, 3, 1), (64, 8, 3, 1), (16, 4, 4, 2), (32, 8, 4, 1),
    )),
    *(KernelConfig(32, n, 8, stages, 1) for n, stages in ((32, 3), (32, 4), (64, 2), (64, 3))),
    *(KernelConfig(64, n, 8, stages, 1) for n, stages in ((32, 3), (32, 2), (64, 2), (32, 4), (16, 4))),
]  # fmt: skip
"""Tile shapes of rows of 576 bfloat16 elements that fit in shared memory."""


def random_shape(seed: int) -> tuple[AttentionShape, tuple[Form, ...]]:
    """Return a random shape and form."""
    chance = random.Random(seed)
    value, rest = chance.choice(((512, 64), (512, 64), (512, 0), (256, 64), (128, 32), (256, 32), (512, 256), (40, 9)))
    dtype = chance.choice(("bfloat16",) * 4 + ("float16", "float32"))
    kv = "float8_e4m3fn" if dtype == "bfloat16" and chance.random() < 0.15 else dtype
    shape = AttentionShape(
        chance.choice((128, 96, 64, 40, 32, 20, 16, 12, 6, 5, 1)), 1, value + rest,
        chance.choice((1, 2, 16, 32, 48, 64, 128)), dtype, kv, window_left=chance.choice((-1,) * 5 + (100,)),
        logits_soft_cap=chance.choice((0.0,) * 5 + (3.0,)), sinks=chance.random() < 0.2, softmax_scale=192**-0.5,
        value_dim=value, latent=True,
    )  # fmt: skip
    stores = (Form.ENGINE_STORES,) if chance.random() < 0.2 else ()
    return shape, stores + ((Form.LATENT_PARTS,) if rest and chance.random() < 0.25 else ())


def check(shapes: int, batches: int, seed: int) -> int:
    """Compare random batches with float64 and print one line for each shape; return the number of wrong batches."""
    plugin, wrong, count = load("cuda_triton"), 0, 0
    problems = {n: list(_problems(n, batches)) for n in range(seed, seed + shapes)}
    if DEVICE == "cuda":
        _compile(one.geometry for found in problems.values() for one in found)
    for number, found in problems.items():
        errors = [_error(plugin, one) for one in found]
        bad = [n for n, (error, _) in enumerate(errors) if not error < ROUNDOFF[found[0].geometry.attention.q_dtype]]
        wrong, count = wrong + len(bad), count + len(found)
        a, modes = found[0].geometry.attention, " ".join(one.batch.mode.value for one in found)
        worst = max(error for error, _ in errors), max(error for _, error in errors)
        print(
            f"{number:3} {a.num_qo_heads:3} heads {a.value_width}+{a.head_dim - a.value_width} page {a.page_size:3} "
            f"{a.kv_dtype:13} window {a.window_left:3} cap {a.logits_soft_cap:.0f} sinks {a.sinks:d} "
            f"{[str(form.value) for form in found[0].geometry.forms]}: out {worst[0]:.1e} lse {worst[1]:.1e} "
            f"({modes}){'  WRONG: ' + str(bad) if bad else ''}", flush=True,
        )  # fmt: skip
    print(f"{count} batches of {shapes} shapes, {wrong} wrong")
    return wrong


def _compile(geometries: Iterable[Geometry]) -> None:
    """Compile the kernels of all geometries in parallel."""
    specs = dict.fromkeys(spec for geometry in geometries for spec in _kernels(geometry))
    print(store_kernels(list(specs), lambda *_: None), flush=True)


def _kernels(geometry: Geometry) -> list[KernelSpec]:
    """Return the kernels of a geometry that write lse, and those without that choice."""
    found = kernels_of(geometry, use=EngineUse(lse=True), trees=False)
    return [one for one in found if dict(one.constexprs).get(_path(one, "WITH_LSE"), True)]


def _path(spec: KernelSpec, name: str) -> tuple[int, ...] | None:
    names = spec.kernel.arg_names
    return (names.index(name),) if name in names else None


def _problems(number: int, batches: int) -> Iterator[Problem]:
    shape, forms = random_shape(number)
    modes = random.Random(number).sample(list(Mode), 3)
    for n in range(batches):
        sizes = Sizes(6, 3000, 33) if shape.num_qo_heads < 64 else Sizes(4, 2000, 20)
        sizes = sizes if DEVICE == "cuda" else Sizes(3, 300, 5)
        yield draw(shape, modes[n % 3], 1000 * number + n, DEVICE, sizes, forms)


def _error(plugin, problem: Problem) -> tuple[float, float]:
    """Return the relative error of out by norm and the largest error of lse; NaN if anything is wrong."""
    backend, batch = plugin.open(problem.geometry, DEVICE), problem.batch
    out, lse = problem.new_out()
    backend.plan(batch)
    backend.write_metadata(batch)
    if Form.ENGINE_STORES not in problem.geometry.forms:
        backend.write_kv(problem.k, problem.v, problem.cache, batch)
    backend.attend(problem.q, problem.cache, batch, out, lse)
    expected, expected_lse = problem.expected()
    live = len(expected)
    if not out.isfinite().all() or lse.isnan().any():
        return float("nan"), float("nan")
    error = ((out[:live].cpu().double() - expected).norm() / expected.norm()).item()
    return error, (lse[:live].cpu().double() - expected_lse).abs().max().item()


def cases(given: argparse.Namespace) -> Iterator[Case]:
    """Yield the cases that the command line names."""
    for heads, page, rows, name in product(given.heads, given.pages, given.rows, given.case):
        requests, keys = map(int, name.split("x"))
        yield Case(heads, requests, keys, rows, page)


def show_times(given: argparse.Namespace) -> None:
    """Print one line for each case."""
    print("heads page rows requests x keys: us, floor of bytes, floor of products, us / larger floor; tile")
    for case in cases(given):
        us, (moved, products), geometry = Timed(case).microseconds(), case.floors, case.geometry()
        config = select.select_config(geometry.attention, geometry.device, case.rows, num_reqs=case.requests)
        print(
            f"{case.heads:4} {case.page:3} {case.name:>16}: {us:8.1f} {moved:7.1f} {products:7.1f} "
            f"{us / max(moved, products):5.2f}  {_tile(config)}", flush=True,
        )  # fmt: skip


def sweep(given: argparse.Namespace) -> None:
    """Print the time of each tile shape for each case, the fastest first."""
    for case in cases(given):
        found = []
        for config in SWEEP:
            if config.block_m > max(16, case.rows * case.heads):
                continue
            _force(config)
            try:
                found.append((Timed(case).microseconds(), _tile(config)))
            except Exception as error:
                print(f"{_tile(config)}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        print(
            f"{case.heads} heads, page {case.page}, {case.name}: "
            + "; ".join(f"{us:.1f} {tile}" for us, tile in sorted(found)), flush=True,
        )  # fmt: skip


def _force(config: KernelConfig) -> None:
    """Make every latent batch use a tile shape."""
    latent_heuristics.decode_config = lambda shape, device, rows: config
    latent_heuristics.latent_candidates = lambda shape, device: (config,)
    select._candidates.cache_clear()


def _tile(config: KernelConfig) -> str:
    return f"{config.block_m}x{config.block_n} w{config.num_warps} s{config.num_stages} c{config.ctas_per_sm}"


def main() -> None:
    """Run one of the three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("check", "time", "sweep"))
    parser.add_argument("--shapes", type=int, default=42)
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heads", nargs="+", type=int, default=[128, 16])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 32])
    parser.add_argument("--pages", nargs="+", type=int)
    parser.add_argument("--case", nargs="+")
    given = parser.parse_args()
    given.pages = given.pages or ([64, 16] if given.command == "time" else [64])
    given.case = given.case or (list(CASES) if given.command == "time" else ["64x4096"])
    if given.command != "time":
        os.environ["DRAFTMARK_PREPARE"] = "0"  # opening a backend would compile kernels that nothing launches here
    if given.command == "check":
        raise SystemExit(check(given.shapes, given.batches, given.seed) > 0)
    (show_times if given.command == "time" else sweep)(given)


if __name__ == "__main__":
    main()
