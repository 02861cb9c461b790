"""Fuzz of latent rows of 656 bytes: random batches on a GPU against float64, over all keys and over lists.

    python -m plugins.cuda_triton.tools.fp8_ds_mla_fuzz [--batches 300] [--seconds 60] [--seed 0]

Each batch has one of SHAPES, a random mode, tree and lengths. Outputs start as NaN, every part of unwritten rows is
NaN, and a second run must give the same bits. The command stops at `--seconds`, prints every wrong batch, and exits
with 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Iterator

from draftmark import FP8_DS_MLA, AttentionShape, Form, Mode
from draftmark_cuda_triton.compiled.prepare import store_kernels
from draftmark_cuda_triton.kernel_list import EngineUse, kernels_of
from draftmark_cuda_triton.kernel_spec import KernelSpec

from .chosen_batches import draw_chosen
from .latent_batches import Problem, Sizes, draw
from .latent_fuzz import describe, error_of

FORMS = (Form.ENGINE_STORES,)
SHAPES = ((16, 64, 0), (128, 64, 0), (20, 16, 0), (5, 1, 0), (16, 64, 130), (128, 64, 130), (5, 1, 48))
"""Query heads, page size, and entries of a list (0 for none)."""
MODES = (Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY, Mode.EXTEND)


def _shape(heads: int, page: int, width: int) -> AttentionShape:
    return AttentionShape(
        heads, 1, 576, page, "bfloat16", "float8_e4m3fn", softmax_scale=192**-0.5, value_dim=512, latent=True,
        chosen_width=width, row_format=FP8_DS_MLA,
    )  # fmt: skip


def problems(seed: int, device: str) -> Iterator[Problem]:
    """Yield random batches without end, one shape after another."""
    while True:
        chance = random.Random(seed)
        shape = _shape(*SHAPES[seed % len(SHAPES)])
        sizes = Sizes(4, chance.choice((70, 300, 1200)), chance.choice((4, 9)))
        make = draw_chosen if shape.chosen_width else draw
        yield make(shape, chance.choice(MODES), seed, device, sizes, FORMS)
        seed += 1


def kernels(count: int) -> list[KernelSpec]:
    """Return the kernels of `count` batches, with log-sum-exps."""
    found: dict[KernelSpec, None] = {}
    for problem, _ in zip(problems(0, "cpu"), range(count), strict=False):
        for trees in (False, True):
            found |= dict.fromkeys(kernels_of(problem.geometry, 90, EngineUse(lse=True, tree_tails=trees), trees=False))
    return list(found)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    begin, wrong, count = time.monotonic(), 0, 0
    if given.device == "cuda":
        os.environ["DRAFTMARK_PREPARE"] = "0"  # kernels of all batches are compiled at once
        print(store_kernels(kernels(28), lambda *_: None), f"{time.monotonic() - begin:.0f} s", flush=True)
    begin = time.monotonic()
    for count, problem in enumerate(problems(given.seed, given.device), 1):
        if error := error_of(problem, given.device):
            wrong += 1
            print(f"WRONG seed {given.seed + count - 1}: {error}: {describe(problem)}", flush=True)
        if count == given.batches or time.monotonic() - begin > given.seconds or wrong > 20:
            break
    print(f"{count} batches of {len(SHAPES)} shapes, {wrong} wrong", flush=True)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
