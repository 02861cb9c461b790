"""Plain decoding of one request with the one-row kernels, compared with the products that serve several rows.

    python -m benchmarks.decode.end_to_end.one_row --json benchmarks/results/end-to-end-one-row-h200.json

Two engines over the same weights decode alternately, in rounds of one run. One has captured its forwards with
`models.row_kernels`, the other has not. The order changes from round to round. SmolLM2 also decodes held-out prompts
with both engines: `texts` has the number of equal texts, and how close to a tie the others differ. `speed_of_one_row`
is the speed of the one-row kernels over that of the other products, the median of the rounds (higher is faster).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from draftmark_speculative import decode
from draftmark_speculative.engine import Engine
from draftmark_speculative.models import CausalLM
from heads.smollm2_135m.training.prompts import HELD_OUT
from heads.smollm2_135m.training.text import chat

from .measure import Case, _run, near_ties, open_engine, release
from .models import LLAMA, SMOLLM2, SMOLLM2_SHAPE, Subject, llama, seat, smollm2, smollm2_shape
from .timeline import timeline

VARIANTS = {"one-row kernels": True, "products as for more rows": False}
CONTEXTS = (1024, 8192)
WARM = 8
"""Rounds of each engine before the first measured round."""


@contextmanager
def products(model: CausalLM, one_row: bool) -> Iterator[None]:
    """Run and capture forwards of one row with the one-row kernels, or without them."""
    layers = [] if model._fused is None else model._fused._layers
    before = [layer._kernels for layer in layers]
    for layer in layers:
        layer._kernels = layer._kernels if one_row else replace(layer._kernels, row_product=None)
    try:
        yield
    finally:
        for layer, kernels in zip(layers, before, strict=True):
            layer._kernels = kernels


@dataclass
class Rounds:
    """Holds the rows of one run. The file is written after each model and context."""

    args: argparse.Namespace
    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    texts: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, subject: Subject, context: int) -> None:
        """Decode alternately with both engines, and add a row for each engine and round."""
        rounds, steps = self.args.rounds, self.args.steps
        most = subject.model.max_context_len
        steps = min(steps, (most - context - 64) // (rounds + 3) - WARM)
        if steps < 8:
            return
        engines = {name: self._engine(subject, context, one_row) for name, one_row in VARIANTS.items()}
        taken: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds):
            for name in list(engines)[:: 1 if number % 2 else -1]:
                tokens, seconds = _run(engines[name], steps)
                taken[name].append(tokens / seconds)
                self.rows.append({
                    "model": subject.name, "context": context, "variant": name, "round": number, "steps": steps,
                    "tokens_per_s": round(tokens / seconds, 1), "round_ms": round(seconds / steps * 1e3, 4),
                })  # fmt: skip
        speed = statistics.median(a / b for a, b in zip(*taken.values(), strict=True))
        medians = {name: round(statistics.median(speeds), 1) for name, speeds in taken.items()}
        ratio = {"model": subject.name, "context": context, "speed_of_one_row": round(speed, 4)}
        ratio["tokens_per_s"] = medians
        self.ratios.append(ratio)
        print(json.dumps(ratio), flush=True)
        self.write()
        if self.args.device == "cuda" and context == CONTEXTS[0]:
            for name, engine in engines.items():
                self.timelines.append({"model": subject.name, "context": context, "variant": name, **timeline(engine)})
            self.write()

    def compare_texts(self, subject: Subject) -> None:
        """Decode held-out prompts with both engines, one prompt after another, and compare the texts."""
        ids = [tuple(tokens) for tokens in chat(subject.model, HELD_OUT)]
        ids = ids[:: max(1, len(ids) // self.args.texts)][: self.args.texts]
        case = Case(subject.name, "answers", self.args.backend, "none", (1, 1, 1), 1, 0)
        longest = -(-(max(map(len, ids)) + self.args.new_tokens) // 64) * 64
        found = {}
        for name, one_row in VARIANTS.items():
            with products(subject.model, one_row):
                engine, _ = open_engine(case, subject, longest, graph=self.args.device == "cuda")
                found[name] = [one.tokens for one in decode(engine, ids, self.args.new_tokens)]
        ours, base = found.values()
        equal = sum(a == b for a, b in zip(ours, base, strict=True))
        ties = near_ties(subject.model, ids, ours, base)
        dtype = str(subject.model.dtype).removeprefix("torch.")
        self.texts.append({"model": subject.name, "dtype": dtype, "equal": equal, "of": len(ids), **ties})
        print(json.dumps(self.texts[-1]), flush=True)
        self.write()

    def write(self) -> None:
        """Write the result file."""
        versions = origin.versions("draftmark", "torch", "triton", "transformers")
        origin.write(self.args.json, {
            "schema": 2, "commit": self.args.commit, "device": origin.device_name(self.args.device),
            "versions": versions, "backend": self.args.backend, "about": self.args.about, "ratios": self.ratios,
            "texts": self.texts, "timelines": self.timelines, "rows": self.rows,
        })  # fmt: skip

    def _engine(self, subject: Subject, context: int, one_row: bool) -> Engine:
        rounds = self.args.rounds + 3
        limit = min(-(-(context + rounds * (self.args.steps + WARM) + 64) // 64) * 64, subject.model.max_context_len)
        case = Case(subject.name, "window", self.args.backend, "none", (1, 1, 1), 1, context)
        subject.model.stop_token_ids = ()
        with products(subject.model, one_row):
            engine, _ = open_engine(case, subject, limit, graph=self.args.device == "cuda")
            seat(engine, 1, context)
            _run(engine, WARM)
        return engine


def main() -> None:
    """Measure each model in turn."""
    args = _arguments()
    args.commit = args.commit or origin.commit()
    found, start = Rounds(args), time.perf_counter()
    for name in args.model:
        subject = _subject(name, args)
        stops = subject.model.stop_token_ids
        for context in (64,) if args.tiny else CONTEXTS:
            found.measure(subject, context)
            release()
        subject.model.stop_token_ids = stops
        if name == SMOLLM2 and args.texts:
            found.compare_texts(subject)
            release()
    print(f"{len(found.rows)} rows, {time.perf_counter() - start:.0f} s", flush=True)


def _subject(name: str, args: argparse.Namespace) -> Subject:
    if name == LLAMA:
        return llama({}, args.device, args.tiny)
    if name == SMOLLM2_SHAPE:
        return smollm2_shape(args.device)
    return smollm2(args.weights, None, "bfloat16" if args.device == "cuda" else "float32", args.device)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--model", nargs="+", default=[LLAMA, SMOLLM2], choices=[LLAMA, SMOLLM2, SMOLLM2_SHAPE])
    parser.add_argument("--rounds", type=int, default=9, help="rounds, in each of which both engines decode")
    parser.add_argument("--steps", type=int, default=48, help="tokens of an engine in a round")
    parser.add_argument("--texts", type=int, default=16, help="held-out prompts to decode; 0 for none")
    parser.add_argument("--new-tokens", type=int, default=128, help="largest number of tokens of a text")
    parser.add_argument("--backend", default="cuda_triton")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--weights", help="folder or GGUF file of SmolLM2; by default the bundled one")
    parser.add_argument("--tiny", action="store_true", help="use a tiny Llama shape, to test the benchmark itself")
    parser.add_argument("--about", default="", help="remark for the reader of the record")
    parser.add_argument("--commit", help="commit to record; by default DRAFTMARK_COMMIT or git's HEAD")
    return parser.parse_args()


if __name__ == "__main__":
    main()
