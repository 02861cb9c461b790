"""Times the tree operations of the decoding loop: cuda_triton's kernels compared with torch, in CUDA graphs.

    python -m benchmarks.decode.loop_helpers --json benchmarks/results/loop-helpers-h200.json

Operations, per round and layer group:

* `tail` writes mask, depths and positions from parents.
* `walk` finds the accepted path from the target's tokens.
* `compact` makes the path's KV contiguous: 32 layers of 8 heads of 128, bf16, page 64.
* `round` does all three.

Results are compared bit by bit before they are timed. A time is the median of CUDA-graph replays. `beam` trees have the
form that a draft of topk 8 gives, `chain` trees have one branch. A target equals a draft with probability 0.7.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import origin
from benchmarks.attention.cases import microseconds
from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode, load
from draftmark.batch import BatchBuffers, ForwardBatch
from draftmark.cache import KVPool
from draftmark.devices import device_profile
from draftmark.lengths import Unknown
from draftmark.tree import TorchTreeOps, TreeOps, VerifyResult

REQUESTS, NODES, TREES = (1, 64, 256), (8, 16, 64), ("beam", "chain")
LAYERS, CONTEXT, TOPK, AGREES = 32, 512, 8, 0.7


@dataclass
class Case:
    """Holds the inputs of one speculation round on the device."""

    name: str
    geometry: Geometry
    batch: ForwardBatch
    drafts: torch.Tensor
    parents: torch.Tensor
    targets: torch.Tensor
    pool: KVPool


def build(requests: int, nodes: int, tree: str) -> Case:
    """Make a random case: prefix lengths from CONTEXT / 8 to CONTEXT, pages in random order, random KV."""
    attention = AttentionShape(32, 8, 128, 64)
    geometry = Geometry.create(
        attention, Limits(requests, CONTEXT), DraftShape(TOPK, 5, nodes), device_profile("cuda"), (Mode.VERIFY,)
    )
    chance, generator = random.Random(nodes), torch.Generator().manual_seed(requests)
    batch = BatchBuffers(geometry, "cuda").uniform(
        Mode.VERIFY, 0, requests, requests, Unknown(requests, CONTEXT), tree=True
    )
    batch.prefix_lens.copy_(torch.randint(CONTEXT // 8, CONTEXT, (requests,), generator=generator))
    pages = requests * geometry.max_pages_per_req
    batch.page_table.copy_((torch.randperm(pages, generator=generator) + 1).view(requests, -1))
    parents = [_parents(nodes, tree, chance) for _ in range(requests)]
    drafts = [list(range(1000, 1000 + nodes)) for _ in range(requests)]
    targets = [_targets(one, chance) for one in parents]
    pool = KVPool(geometry, LAYERS, pages + 1, 1, "cuda")
    for tensor in (pool.k, pool.v):
        tensor.view(torch.int16).random_(0, 1 << 14)
    made = (torch.tensor(rows).cuda() for rows in (drafts, parents, targets))
    return Case(f"{requests}x{nodes}-{tree}", geometry, batch, *made, pool)


def _parents(nodes: int, tree: str, chance: random.Random) -> list[int]:
    """Return the parents of a tree. `beam` has topk nodes per step; each continues a random node of the step before."""
    if tree == "chain":
        return list(range(-1, nodes - 1))
    first = [0 if step == 0 else 1 + (step - 1) * TOPK for step in range(nodes)]
    parents = [-1]
    for node in range(1, nodes):
        step = (node - 1) // TOPK
        width = 1 if step == 0 else TOPK
        parents.append(first[step] + chance.randrange(width))
    return parents


def _targets(parents: list[int], chance: random.Random) -> list[int]:
    """Return target tokens. Each equals a child's draft (token 1000 + node) with probability AGREES, else no draft."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return [
        1000 + chance.choice(children[node]) if node in children and chance.random() < AGREES else 7
        for node in range(len(parents))
    ]


def operations(case: Case, ops: TreeOps) -> dict[str, Callable[[], object]]:
    """Return, for each operation name, a function that runs the operation once on the case."""
    kept = TorchTreeOps(case.geometry).verify_tree(case.drafts, case.parents, case.targets)

    def whole() -> VerifyResult:
        ops.write_tail(case.batch, case.parents)
        found = ops.verify_tree(case.drafts, case.parents, case.targets)
        ops.compact(case.pool, case.batch, found)
        return found

    return {
        "tail": lambda: ops.write_tail(case.batch, case.parents),
        "walk": lambda: ops.verify_tree(case.drafts, case.parents, case.targets),
        "compact": lambda: ops.compact(case.pool, case.batch, kept),
        "round": whole,
    }


def results(case: Case, ops: TreeOps) -> list[torch.Tensor]:
    """Return copies of all tensors that one round writes, and restore the KV pool."""
    before = case.pool.k.clone(), case.pool.v.clone()
    for tensor in (case.batch.positions, case.batch.tail.mask, case.batch.tail.depth):  # type: ignore[union-attr]
        tensor.fill_(-7)
    found = operations(case, ops)["round"]()
    tail = case.batch.tail
    kept = [case.batch.positions, tail.mask, tail.depth, *found, case.pool.k, case.pool.v]  # type: ignore
    kept = [one.view(torch.int16) if one.dtype is torch.bfloat16 else one for one in kept]
    sums = [one.clone() for one in kept[:-2]] + [_digest(one) for one in kept[-2:]]
    case.pool.k.copy_(before[0])
    case.pool.v.copy_(before[1])
    return sums


def _digest(pool: torch.Tensor) -> torch.Tensor:
    """Return one number per layer and page, which changes if a row moves."""
    flat = pool.flatten(2)
    weight = torch.arange(1, flat.shape[2] + 1, device=pool.device, dtype=torch.int64)
    return torch.stack([(layer.long() * weight).sum(-1) for layer in flat])


def measure(requests: int, nodes: int, tree: str) -> list[dict]:
    """Return one row per operation."""
    case = build(requests, nodes, tree)
    sides = {
        "torch": TorchTreeOps(case.geometry),
        "cuda_triton": load("cuda_triton").tree_ops(case.geometry, torch.device("cuda")),
    }
    wanted, got = (results(case, ops) for ops in sides.values())
    same = all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert same, f"{case.name}: cuda_triton differs from torch"
    counts = wanted[4].double()
    rows = []
    for operation in ("tail", "walk", "compact", "round"):
        repeats = 2 if operation in ("compact", "round") else 10
        us = {side: microseconds([operations(case, ops)[operation]] * repeats) for side, ops in sides.items()}
        rows.append({
            "case": f"{operation}-{case.name}", "torch_us": us["torch"], "cuda_triton_us": us["cuda_triton"],
            "ratio": us["torch"] / us["cuda_triton"], "mean_kept": counts.mean().item(), "checked": same,
        })  # fmt: skip
        torch.cuda.empty_cache()
        print(_line(rows[-1]), flush=True)
    return rows


def _line(row: dict) -> str:
    return (
        f"{row['case']:22} torch {row['torch_us']:8.1f} us, cuda_triton {row['cuda_triton_us']:6.1f} us: "
        f"{row['ratio']:6.1f} times; kept {row['mean_kept']:.2f}"
    )


def main() -> None:
    """Measure all cases and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="commit to record; by default git's HEAD")
    args = parser.parse_args()
    commit = args.commit or origin.commit()
    cases = itertools.product(NODES, REQUESTS, TREES)
    rows = [row for nodes, requests, tree in cases for row in measure(requests, nodes, tree)]
    versions = origin.versions("torch", "triton", "draftmark")
    result = {
        "schema": 1, "commit": commit, "device": torch.cuda.get_device_name(), "versions": versions, "rows": rows,
    }  # fmt: skip
    origin.write(args.json, result)


if __name__ == "__main__":
    main()
