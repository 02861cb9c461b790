"""Times prefill after a long prefix over latent rows (MLA): absorbed by `cuda_triton`, next to un-absorbed.

    python -m benchmarks.attention.latent_extend [--heads 128 16] [--prefix 4096 32768] [--rows 64 512]

One request has `prefix` stored tokens and a chunk of `rows` new tokens. Absorbed: q is projected to the width of the
latent rows, `attend` reads the cache, and the output is projected to the heads. Un-absorbed, as engines prefill: the
latent rows of prefix and chunk are gathered and projected to keys of 192 and values of 128 elements for each head, and
FlashAttention 3 attends to them. Both ways begin with q in front of the absorption and end with 128 elements a head.
Times are medians of interleaved rounds in microseconds. Some rows of the absorbed output are compared with float64.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode, load
from draftmark.batch import Causal, ForwardBatch
from draftmark.devices import device_profile
from draftmark.lengths import Exact
from draftmark.runtime import KVCache

from .fa3 import FA3_LIBRARY
from .latent_cases import DEVICE, SOFTMAX_SCALE

PAGE, VALUE, REST, HEAD = 64, 512, 64, 128
"""Tokens of a page; elements of both parts of a latent row; elements of a head's value, and of its key without rest."""


class Extend:
    """Tensors of one case, and both ways to compute it."""

    def __init__(self, heads: int, prefix: int, rows: int) -> None:
        self.heads, self.prefix, self.rows, self.keys = heads, prefix, rows, prefix + rows
        shape = AttentionShape(heads, 1, VALUE + REST, PAGE, softmax_scale=SOFTMAX_SCALE, value_dim=VALUE, latent=True)
        self.geometry = Geometry.create(
            shape, Limits(1, self.keys, max_extend_tokens=rows), DraftShape(1, 1, 1), device_profile(DEVICE),
            (Mode.EXTEND,),
        )  # fmt: skip
        pages = -(-self.keys // PAGE)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE) * scale

        self.latents = random(pages + 1, PAGE, VALUE + REST)
        table = torch.zeros(1, int(self.geometry.max_pages_per_req), dtype=torch.int32, device=DEVICE)
        table[0, :pages] = torch.randperm(pages, device=DEVICE).int() + 1
        self.table, self.cache = table, KVCache.latent(self.latents, value_dim=VALUE)
        self.q = random(rows, heads, HEAD + REST)
        self.up_k, self.up_v = random(heads, HEAD, VALUE, scale=VALUE**-0.5), random(heads, VALUE, HEAD, scale=0.05)
        self.absorbed_q = torch.empty(rows, heads, VALUE + REST, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.full((rows, heads, VALUE), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        lens = torch.full((1,), prefix, dtype=torch.int32, device=DEVICE)
        self.indptr = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
        self.batch = ForwardBatch(
            Mode.EXTEND, 0, lens, self.indptr, table, Causal(), torch.zeros(rows, dtype=torch.int64, device=DEVICE),
            Exact((prefix,)), 1, (rows,), (rows,), rows, None,
        )  # fmt: skip
        self.backend = load("cuda_triton").open(self.geometry, DEVICE)
        self.backend.plan(self.batch)
        self.backend.write_metadata(self.batch)
        slot = torch.arange(self.keys, device=DEVICE)
        self.slots = table[0].long()[slot // PAGE] * PAGE + slot % PAGE
        self.project_q()

    def project_q(self) -> None:
        """Project q to the width of the latent rows."""
        nope = torch.bmm(self.q[..., :HEAD].transpose(0, 1), self.up_k)
        self.absorbed_q[..., :VALUE] = nope.transpose(0, 1)
        self.absorbed_q[..., VALUE:] = self.q[..., HEAD:]

    def attend(self) -> None:
        """Attend to the cache."""
        self.backend.attend(self.absorbed_q, self.cache, self.batch, self.out)

    def absorbed(self) -> torch.Tensor:
        """Return the absorbed result, ``[rows, heads, HEAD]``."""
        self.project_q()
        self.attend()
        return torch.bmm(self.out.transpose(0, 1), self.up_v).transpose(0, 1)

    def project_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[keys, heads, 192]`` and values ``[keys, heads, 128]`` of all tokens."""
        rows = self.latents.view(-1, VALUE + REST)[self.slots]
        both = torch.cat((self.up_k.flatten(0, 1), self.up_v.transpose(1, 2).flatten(0, 1)))
        nope, values = (rows[:, :VALUE] @ both.T).view(self.keys, 2, self.heads, HEAD).unbind(1)
        rest = rows[:, None, VALUE:].expand(-1, self.heads, -1)
        return torch.cat((nope, rest), -1), values.contiguous()

    def attend_heads(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return attention of FlashAttention 3 over keys and values of each head, ``[rows, heads, HEAD]``."""
        out = torch.empty(self.rows, self.heads, HEAD, dtype=torch.bfloat16, device=DEVICE)
        ends = torch.tensor([0, self.keys], dtype=torch.int32, device=DEVICE)
        torch.ops._vllm_fa3_C.fwd(
            self.q, k, v, None, None, None, out, self.indptr, ends, None, None, None, self.rows, self.keys, None, None,
            None, None, None, None, None, None, None, SOFTMAX_SCALE, True, -1, -1, 0.0, True, None, 1, None, 0, None, 1,
            0, None,
        )  # fmt: skip
        return out

    def error(self) -> float:
        """Return the relative error of the absorbed attention in a few rows and heads, against float64."""
        at = torch.tensor(sorted({0, self.rows // 3, self.rows // 2, self.rows - 1}), device=DEVICE)
        heads = slice(0, min(4, self.heads))
        stored = self.latents.view(-1, VALUE + REST)[self.slots].double()
        scores = torch.einsum("rhd,kd->rhk", self.absorbed_q[at][:, heads].double(), stored) * SOFTMAX_SCALE
        seen = torch.arange(self.keys, device=DEVICE) <= (self.prefix + at)[:, None]
        expected = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ stored[:, :VALUE]
        return ((self.out[at][:, heads].double() - expected).norm() / expected.norm()).item()


def microseconds(call: Callable[[], Any]) -> float:
    """Return the time of one call."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def measure(case: Extend, rounds: int) -> dict[str, Any]:
    """Return the result of one case."""
    calls: dict[str, Callable[[], Any]] = {"attend": case.attend, "absorbed": case.absorbed}
    library = os.environ.get(FA3_LIBRARY, "")
    if os.path.exists(library):
        torch.ops.load_library(library)
        k, v = case.project_keys()
        calls |= {
            "project_keys": case.project_keys, "attend_heads": lambda: case.attend_heads(k, v),
            "unabsorbed": lambda: case.attend_heads(*case.project_keys()),
        }  # fmt: skip
    for name, call in list(calls.items()):
        try:
            call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            print(f"{name} is absent: {str(error)[:150]}", flush=True)
            del calls[name]
    error = case.error()
    difference = None
    if "unabsorbed" in calls:
        one, other = case.absorbed().double(), calls["unabsorbed"]().double()
        difference = ((one - other).norm() / other.norm()).item()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(microseconds(call))
    products = 2 * case.rows * case.heads * (case.prefix + case.rows / 2) * (2 * VALUE + REST)
    return {
        "case": f"extend{case.rows}-1x{case.prefix}", "heads": case.heads, "page_size": PAGE, "error": error,
        "difference": difference, "floor_us": round(products / 790e12 * 1e6, 1),
        **{f"{name}_us": round(median(us), 1) for name, us in times.items()},
    }  # fmt: skip


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", nargs="+", type=int, default=[128, 16])
    parser.add_argument("--prefix", nargs="+", type=int, default=[32768, 4096])
    parser.add_argument("--rows", nargs="+", type=int, default=[64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    given = parser.parse_args()
    found = []
    for heads, prefix, rows in product(given.heads, given.prefix, given.rows):
        found.append(measure(Extend(heads, prefix, rows), given.rounds))
        print(found[-1], flush=True)
        torch.cuda.empty_cache()
        if given.json:
            Path(given.json).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
