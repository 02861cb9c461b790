"""Train an EAGLE draft head for a model on text that the model writes itself; no data set is needed.

    python -m heads.smollm2_135m.training --minutes 9 --out heads/smollm2_135m/src/draftmark_head_smollm2_135m

Phases, each limited by a share of the time:

1. The target writes answers, greedy and sampled, to prompts from templates and to prompts that it samples itself.
2. Several candidate heads train side by side on the same batches.
3. The best candidate on held-out prompts trains until the end.
4. The head is saved, loaded again and measured on the held-out prompts.

`--work` keeps the text and the training state; a second call with this folder continues from there. `--start`
continues from a head, on new text if the seed is another.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from draftmark_speculative.eagle import DraftHead
from draftmark_speculative.models import CausalLM, load_model

from .acceptance import acceptance
from .prompts import HELD_OUT, training_prompts
from .text import Sample, Writer, chat, own_prompts, write_all
from .trainer import Candidate, Plan, train

TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
"""Temperatures of the answers in turn; half of the answers are greedy."""


def text(model: CausalLM, plan: Plan, work: Path) -> tuple[list[Sample], list[Sample]]:
    """Return training samples and held-out samples (greedy), read from the work folder if they are there."""
    file = work / "text.pt"
    if file.exists():
        stored = torch.load(file, weights_only=True)
        return [Sample(*row) for row in stored["training"]], [Sample(*row) for row in stored["held_out"]]
    start = time.perf_counter()
    writer = Writer(model, plan.write_batch, plan.prompt_width, plan.new_tokens, model.stop_token_ids)
    held_out = []
    for first in range(0, len(HELD_OUT), plan.write_batch):
        questions = chat(model, HELD_OUT[first : first + plan.write_batch])
        held_out += writer.write(questions, [0.0] * len(questions))
    prompts = _prompts(model, writer, plan)
    left = plan.minutes * 60 * plan.writing - (time.perf_counter() - start)
    training = write_all(writer, prompts, TEMPERATURES, left)
    print(f"text: {len(training)} answers in {time.perf_counter() - start:.0f} s", flush=True)
    rows = {"training": training, "held_out": held_out}
    torch.save({name: [(s.tokens, s.prompt_len, s.temperature) for s in rows[name]] for name in rows}, file)
    return training, held_out


def _prompts(model: CausalLM, writer: Writer, plan: Plan) -> Iterator[list[int]]:
    """Yield two template prompts for each prompt that the target sampled, then only template prompts.

    Template prompts longer than `plan.prompt_width` are skipped.
    """
    own = own_prompts(writer, plan.own)
    random.Random(plan.seed).shuffle(own)
    texts = training_prompts(plan.seed)
    while True:
        written = [p for p in chat(model, list(itertools.islice(texts, 256))) if len(p) <= plan.prompt_width]
        mixed = written + [own.pop() for _ in range(min(len(own), len(written) // 2))]
        random.Random(len(own)).shuffle(mixed)
        yield from mixed


def main() -> None:
    """Write text, train a head, save it, measure it and write the report."""
    began = time.perf_counter()
    args, plan = _arguments()
    work, out = args.work or args.out, args.out
    work.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    torch.manual_seed(plan.seed)
    model = load_model(args.model, dtype=dtype, device=device)
    model.hf.requires_grad_(False)
    print(f"{model.name} as {dtype} on {device}, {time.perf_counter() - began:.0f} s", flush=True)
    samples, held_out = text(model, plan, work)
    candidates = [Candidate(tuple(map(int, f.split(","))), s) for f in args.features for s in args.sharpness]
    trainee, report = train(model, samples, held_out, candidates, plan, began, work, out, args.start)
    trainee.finished(torch.bfloat16).save(out)
    head = DraftHead.load(out, dtype=model.dtype, device=device)
    scores = [acceptance(model, head, held_out, steps) for steps in (plan.steps // 2, plan.steps)]
    answers = {
        "answers": len(samples), "answer_tokens": sum(len(s.answer) for s in samples), "temperatures": TEMPERATURES,
    }  # fmt: skip
    result = {
        "schema": 1, "model": model.name, "dtype": dtype, "device": _device(device),
        "versions": origin.versions("torch", "transformers"),
        "plan": asdict(plan), "start": _lineage(args.start), "chosen": asdict(trainee.candidate), "text": answers,
        **report, "held_out": scores, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    origin.write(out / "training.json", result)
    print(json.dumps({"chosen": asdict(trainee.candidate), "held_out": scores}, indent=1))


def _arguments() -> tuple[argparse.Namespace, Plan]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="folder or GGUF file; default: the bundled SmolLM2-135M-Instruct")
    parser.add_argument("--out", type=Path, required=True, help="folder for head.json, head.safetensors, training.json")
    parser.add_argument("--work", type=Path, help="folder for text and training state; default: --out")
    parser.add_argument("--start", type=Path, help="folder of a head to continue from")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--features", nargs="+", default=["30", "10,20,30"], help="candidates, such as 30 10,20,30")
    parser.add_argument("--sharpness", nargs="+", type=float, default=[1.0, 2.0])
    parser.add_argument("--minutes", type=float, default=9)
    defaults = Plan(0)
    for name in ("seed", "vocab", "steps", "batch_tokens", "write_batch", "prompt_width", "new_tokens", "own"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name))
    for name in ("writing", "choosing", "lr"):
        parser.add_argument(f"--{name}", type=float, default=getattr(defaults, name))
    args = parser.parse_args()
    given = {name: value for name, value in vars(args).items() if name in Plan.__dataclass_fields__}
    return args, Plan(**given)


def _lineage(start: Path | None) -> Any:
    """Return the training record of the head that training started from, or its name without a record."""
    if start is None:
        return None
    file = start / "training.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else str(start.name)


def _device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu"


if __name__ == "__main__":
    main()
