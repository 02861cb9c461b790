"""Calibration of a head: its probabilities for drafts, and the share of these drafts that is kept.

    python -m heads.smollm2_135m.training.confidence --texts held_out.pt --json benchmarks/results/eagle-confidence.json

Rounds follow each other through the target's greedy answers as in `held_out`. Along the path that a round keeps, each
level gives one observation: the head's probabilities for the children there, most probable first, and the child that
was kept. A row of the result is one level of one shape:

* `probability[q]`: quantile of the most probable child's probability.
* `kept[q]`: share of places around that quantile at which this child was kept. Neighbours are pooled until the shares
  ascend. A calibrated head would have this probability.
* `siblings[k]`: among places where the most probable child was not kept, the share that kept the child of rank k.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from draftmark_speculative.eagle import DraftHead
from draftmark_speculative.eagle.installed import installed_head
from draftmark_speculative.models import load_model

from .held_out import greedy_answers
from .text import Sample
from .trees import Place, Shape

QUANTILES = 20
SHAPES: tuple[Shape, ...] = ((1, 4, 5), (4, 4, 16))
Seen = list[tuple[list[float], int | None]]
"""Observations of one level: the children's probabilities, most probable first, and the rank of the kept child."""


def observe(place: Place, row: int, shape: Shape, text: Sequence[int], levels: list[Seen]) -> int:
    """Add the observations of the tree rooted at token ``row + 1`` to each level; return the number of tokens kept."""
    tokens, parents, chances = place.tree_with_chances(row, shape)
    node = 0
    for depth, (seen, wanted) in enumerate(zip(levels, text, strict=False)):
        children = [i for i in range(1, len(tokens)) if parents[i] == node]
        if not children:
            return depth + 1
        children.sort(key=lambda i: -chances[i])
        kept = next((rank for rank, i in enumerate(children) if tokens[i] == wanted), None)
        seen.append(([chances[i] for i in children], kept))
        if kept is None:
            return depth + 1
        node = children[kept]
    return min(len(levels), len(text)) + 1


def summed_up(seen: Seen, topk: int) -> dict[str, Any]:
    """Return one level's row of the result; the module docstring describes its fields."""
    ordered = sorted((chances[0], float(kept == 0)) for chances, kept in seen)
    edges = [i * len(ordered) // QUANTILES for i in range(QUANTILES + 1)]
    bins = [ordered[a:b] for a, b in pairwise(edges)]
    missed = [kept for chances, kept in seen if kept != 0]
    return {
        "places": len(ordered),
        "probability": [round(sum(p for p, _ in one) / len(one), 4) for one in bins],
        "kept": [round(share, 4) for share in ascending([sum(k for _, k in one) / len(one) for one in bins])],
        "siblings": [round(missed.count(rank) / max(1, len(missed)), 4) for rank in range(1, topk)],
    }


def ascending(shares: Sequence[float]) -> list[float]:
    """Return the nearest ascending sequence, by pooling neighbours that descend (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for share in shares:
        pools.append((share, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (a, m), (b, n) = pools[-2:]
            pools[-2:] = [((a * m + b * n) / (m + n), m + n)]
    return [share for share, count in pools for _ in range(count)]


def measure(model: Any, head: DraftHead, samples: Sequence[Sample], shapes: Sequence[Shape]) -> list[dict[str, Any]]:
    """Return a row of the result for each level of each shape."""
    found: dict[Shape, list[Seen]] = {shape: [[] for _ in range(shape[1])] for shape in shapes}
    for index, sample in enumerate(samples, 1):
        place = Place(model, head, sample)
        for shape, levels in found.items():
            row, last = sample.prompt_len - 1, len(sample.tokens) - 2
            while row < last:
                row += observe(place, row, shape, sample.tokens[row + 2 :], levels)
        print(index, {shape: [len(level) for level in levels] for shape, levels in found.items()}, flush=True)
    return [
        {
            "topk": shape[0], "num_steps": shape[1], "num_draft_tokens": shape[2], "level": level,
            **summed_up(seen, shape[0]),
        }
        for shape, levels in found.items()
        for level, seen in enumerate(levels, 1)
    ]  # fmt: skip


def main() -> None:
    """Measure the head and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--texts", type=Path, help="file of the answers; written if it does not exist")
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=320)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load_model(None, dtype="float32", device="cpu")
    head = DraftHead.load(installed_head(model.name), dtype=model.dtype, device="cpu")
    samples = greedy_answers(model, args.texts, args.new_tokens)[: args.prompts]
    result = {
        "schema": 1, "model": model.name, "dtype": "float32", "prompts": len(samples), "new_tokens": args.new_tokens,
        "versions": origin.versions("draftmark", "torch", "transformers"),
        "rows": measure(model, head, samples, SHAPES),
    }  # fmt: skip
    origin.write(args.json, result)


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
