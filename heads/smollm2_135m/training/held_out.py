"""Mean accepted length of a draft head on held-out prompts, greedy.

    python -m heads.smollm2_135m.training.held_out --texts held_out.pt --check 4 \
        --json benchmarks/results/eagle-held-out.json

The target answers every prompt once. The head then drafts trees over the known answers without the engine (`trees`).
`--check` also runs the engine on some prompts: in float32 its texts, its number of rounds and its accepted length must
be equal. Neither measurement counts tokens after the end of a text.

`profile` is, for i = 1, 2, …, the share of rounds that kept at least i drafts among rounds that kept at least i - 1.
`benchmarks.decode.end_to_end` forces such a profile on a model of random weights. Except for rounding, nothing here
depends on the machine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks import origin
from draftmark_speculative import Eagle, Engine, EngineConfig, decode
from draftmark_speculative.eagle import DraftHead
from draftmark_speculative.eagle.installed import installed_head
from draftmark_speculative.models import CausalLM, load_model

from .prompts import HELD_OUT
from .text import Sample, Writer, chat
from .trees import Shape, mean, tree_acceptance

SHAPES: tuple[Shape, ...] = ((1, 4, 5), (4, 4, 16), (8, 6, 48))


def greedy_answers(model: CausalLM, file: Path | None, new_tokens: int) -> list[Sample]:
    """Return the target's answers from the file; if it does not exist, write the answers and the file."""
    if file is not None and file.exists():
        return [Sample(*row) for row in torch.load(file, weights_only=True)]
    prompts = chat(model, HELD_OUT)
    writer = Writer(model, len(prompts), max(map(len, prompts)), new_tokens, model.stop_token_ids)
    samples = writer.write(prompts, [0.0] * len(prompts))
    if file is not None:
        torch.save([dataclasses.astuple(sample) for sample in samples], file)
    return samples


def measure(
    model: CausalLM, head: DraftHead, samples: Sequence[Sample], shapes: Sequence[Shape]
) -> list[dict[str, Any]]:
    """Return a result row for each shape; print a line after every prompt, because a CPU is slow."""
    kept: dict[Shape, Counter[int]] = {shape: Counter() for shape in shapes}
    means: dict[Shape, list[float]] = {shape: [] for shape in shapes}
    for index, sample in enumerate(samples, 1):
        for shape, counts in tree_acceptance(model, head, [sample], shapes).items():
            kept[shape] += counts
            means[shape].append(mean(counts))
        print(index, {shape: round(mean(counts), 3) for shape, counts in kept.items()}, flush=True)
    return [
        {
            "topk": shape[0], "num_steps": shape[1], "num_draft_tokens": shape[2],
            "accepted_len": round(mean(counts), 3), "median_of_prompts": round(median(means[shape]), 3),
            "rounds": counts.total(), "profile": profile(counts),
        }
        for shape, counts in kept.items()
    ]  # fmt: skip


def profile(kept: Counter[int]) -> list[float]:
    """Return the profile of the rounds; the module docstring defines it."""
    reached = [sum(count for n, count in kept.items() if n > i) for i in range(max(kept))]
    return [round(b / a, 3) for a, b in pairwise(reached)]


def check(
    model: CausalLM, head: DraftHead, samples: Sequence[Sample], shapes: Sequence[Shape], backend: str
) -> list[dict[str, Any]]:
    """Run the engine on the prompts; compare its texts with the known answers and its rounds with the head's."""
    rows = []
    for shape in shapes:
        longest = max(len(sample.tokens) for sample in samples)
        config = EngineConfig(
            backend=backend, speculate=Eagle(head, *shape), max_num_reqs=4, page_size=64,
            max_context_len=-(-longest // 64) * 64,
        )  # fmt: skip
        engine, same = Engine(model, config), True
        for sample in samples:  # one prompt at a time, so that each ends where its known answer ends
            [output] = decode(engine, [sample.tokens[: sample.prompt_len]], len(sample.answer))
            same &= output.tokens == sample.answer
        ours, theirs = tree_acceptance(model, head, samples, [shape])[shape], engine.statistics
        rows.append({
            "topk": shape[0], "num_steps": shape[1], "num_draft_tokens": shape[2], "prompts": len(samples),
            "identical": same, "engine_rounds": theirs.verified, "rounds": ours.total(),
            "engine_accepted_len": round(theirs.mean_accepted, 3), "accepted_len": round(mean(ours), 3),
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    return rows


def main() -> None:
    """Measure the head, run the check, and write the result."""
    args = _arguments()
    dtype = args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float32")
    model = load_model(args.model, dtype=dtype, device=args.device)
    folder = args.head or installed_head(model.name)
    head = DraftHead.load(folder, dtype=model.dtype, device=args.device)
    samples = greedy_answers(model, args.texts, args.new_tokens)[: args.prompts]
    samples = [dataclasses.replace(s, tokens=s.tokens[: s.prompt_len + args.new_tokens]) for s in samples]
    shapes = [tuple(map(int, shape.split(","))) for shape in args.shapes] if args.shapes else SHAPES
    short = [dataclasses.replace(s, tokens=s.tokens[: s.prompt_len + 48]) for s in samples[: args.check]]
    checked = check(model, head, short, shapes, args.backend) if short else []
    result = {
        "schema": 1, "model": model.name, "dtype": dtype, "prompts": len(samples), "new_tokens": args.new_tokens,
        "answer_tokens": sum(len(s.answer) for s in samples), "checked": checked,
        "versions": origin.versions("draftmark", "torch", "transformers"),
        "rows": measure(model, head, samples, shapes),
    }  # fmt: skip
    for row in result["rows"]:
        print(json.dumps(row))
    origin.write(args.json, result)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or GGUF file; default: the bundled SmolLM2-135M-Instruct")
    parser.add_argument("--head", help="folder of a head; default: the installed head")
    parser.add_argument("--texts", type=Path, help="file of the answers; written if it does not exist")
    parser.add_argument("--check", type=int, default=0, metavar="N", help="number of prompts that the engine decodes")
    parser.add_argument("--backend", default="reference", help="backend of the check")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="default: float32 on the CPU, bfloat16 on a GPU")
    parser.add_argument("--prompts", type=int, default=len(HELD_OUT))
    parser.add_argument("--new-tokens", type=int, default=320, help="tokens of an answer; longer ones are cut")
    parser.add_argument("--shapes", nargs="+", help="topk,num_steps,num_draft_tokens")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
