"""Mean accepted length of draft trees under two masks: a beam sees its true ancestors, or slots of its branch index.

    python -m benchmarks.decode.draft_ancestors --head PATH --json benchmarks/results/draft-ancestors.json

Both runs have equal heads, prompts and tree shapes. They differ only in the earlier draft slots that a beam sees.
Decoding is greedy, so both texts must be equal, and they are compared. It runs on any device; nothing is timed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from benchmarks.prompts import fixed_set
from draftmark_speculative import Eagle, EngineConfig, generate
from draftmark_speculative.eagle.tree_builder import DraftTreeBuilder
from draftmark_speculative.models import load_model
from heads.smollm2_135m.training.text import chat

SHAPES = ((2, 4, 8), (4, 4, 16), (8, 4, 32), (4, 6, 24))


BEAMS = {"all": 0, "other": 0}
"""Number of beams with a parent beam, and of those that continue another branch index than their own."""


def by_branch_index(growth: DraftTreeBuilder) -> torch.Tensor:
    """Return the draft slots of each beam's ancestors, as if beam b of a step always continued beam b before it."""
    placed, k = growth.slots.shape[1], growth.topk
    own = torch.arange(k, device=growth.tokens.device).expand_as(growth.tokens)
    parents = own + (placed - k) if placed else torch.full_like(growth.tokens, -1)
    if placed:
        BEAMS["all"] += own.numel()
        BEAMS["other"] += int((own != growth.parents).sum())
    growth.slots = torch.cat((growth.slots, parents), 1)
    return growth.slots


@contextmanager
def placed_by(place: Any) -> Iterator[None]:
    """Context manager: replace `DraftTreeBuilder.place` by `place` inside the block."""
    own = DraftTreeBuilder.place
    DraftTreeBuilder.place = place  # type: ignore[method-assign]
    try:
        yield
    finally:
        DraftTreeBuilder.place = own  # type: ignore[method-assign]


def main() -> None:
    """Measure the accepted length of each tree shape under both ancestor masks, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--head")
    parser.add_argument("--model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--prompts", type=int, default=16, help="prompts of examples/prompts/benchmark.jsonl")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = load_model(args.model, device=args.device)
    prompts = chat(model, [row["prompt"] for row in fixed_set()[: args.prompts]])
    found = []
    for topk, steps, nodes in SHAPES:
        config = EngineConfig(
            backend=args.backend, speculate=Eagle(args.head, topk, steps, nodes), max_num_reqs=len(prompts),
            max_context_len=max(map(len, prompts)) + args.max_new_tokens,
        )  # fmt: skip
        right, engine = generate(model, prompts, args.max_new_tokens, config)
        BEAMS.update(all=0, other=0)
        with placed_by(by_branch_index):
            other, changed = generate(model, prompts, args.max_new_tokens, config)
        row = {
            "topk": topk, "num_steps": steps, "num_draft_tokens": nodes, "rounds": engine.statistics.verified,
            "true_ancestors": round(engine.statistics.mean_accepted, 4),
            "branch_index": round(changed.statistics.mean_accepted, 4), "same_text": right == other,
            "beams_that_changed_branch": round(BEAMS["other"] / max(1, BEAMS["all"]), 4),
        }  # fmt: skip
        found.append(row)
        print(json.dumps(row), flush=True)
    result = {"model": model.name, "prompts": len(prompts), "max_new_tokens": args.max_new_tokens, "rows": found}
    origin.write(args.json, result)


if __name__ == "__main__":
    main()
