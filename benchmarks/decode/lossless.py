"""Compares the texts of drafts, graphs and dtypes with plain decoding, on each backend. Nothing is timed.

    python -m benchmarks.decode.lossless --json benchmarks/results/lossless-h200.json [--model FILE]

Every setting is compared with plain decoding of the baseline backend and of its own backend, by the rule of `draftmark
generate --check` (`draftmark_speculative.agreement`):

* transformers' own forward measures how far rounding moves a logit, without any backend.
* Every token must lie within twice that distance of the best token of a float32 copy of the model.
* The backend's logits are allowed twice the error of transformers' logits.

The exit code is 1 if a setting is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from benchmarks.prompts import fixed_set
from draftmark.errors import BackendRefusal
from draftmark_speculative import EngineConfig, HostKind, Ngram, generate
from draftmark_speculative.agreement import Agreement, LogitError
from draftmark_speculative.compare import compare
from draftmark_speculative.models import CausalLM, load_model
from draftmark_speculative.statistics import Statistics
from heads.smollm2_135m.training.text import chat

DRAFTS = {"none": None, "chain": Ngram(1, 6), "tree": Ngram(3, 8)}
PAGE, REQUESTS = 32, 8
Texts = list[tuple[int, ...]]


@dataclass
class Bench:
    """One model in one dtype, its prompts, and the texts of plain decoding on the baseline backend.

    Attributes:
        length: context limit of every engine, a multiple of the page size.
        foreign: texts of plain decoding on the backend `baseline`.
    """

    model: CausalLM
    prompts: list[list[int]]
    tokens: int
    length: int
    baseline: str
    foreign: Texts

    @classmethod
    def of(cls, model: CausalLM, args: argparse.Namespace) -> Bench:
        """Return a `Bench` for the model, with the texts of the baseline backend already decoded."""
        prompts = chat(model, [row["prompt"] for row in fixed_set()[: args.prompts]])
        length = -(-(max(map(len, prompts)) + args.tokens) // PAGE) * PAGE
        bench = cls(model, prompts, args.tokens, length, args.baseline, [])
        bench.foreign, _ = bench.decoded(args.baseline, "none", model.device.type == "cuda")
        return bench

    def config(self, backend: str, draft: str, graph: bool) -> EngineConfig:
        """Return the engine configuration of one setting."""
        return EngineConfig(
            backend=backend, speculate=DRAFTS[draft], page_size=PAGE, max_num_reqs=REQUESTS,
            max_context_len=self.length, max_extend_tokens=256, graph=graph,
            capture_batch_sizes=(1, 2, 4, 8) if graph else (), host_lengths=HostKind.EXACT,
        )  # fmt: skip

    def decoded(self, backend: str, draft: str, graph: bool) -> tuple[Texts, Statistics]:
        """Decode all prompts together and return their texts and the engine's statistics."""
        outs, engine = generate(self.model, self.prompts, self.tokens, self.config(backend, draft, graph))
        return [out.tokens for out in outs], engine.statistics

    def rows(self, backend: str) -> Iterator[dict[str, Any]]:
        """Yield a row per kind of draft, eager and captured. Plain decoding comes first, as a baseline."""
        against = {self.baseline: self.foreign}
        for draft, graph in product(DRAFTS, (False, True)):
            row = {"backend": backend, "dtype": str(self.model.dtype)[6:], "draft": draft, "graph": graph}
            try:
                texts, statistics = self.decoded(backend, draft, graph)
            except BackendRefusal as refusal:
                yield {**row, "result": f"refused: {refusal}"}
                continue
            if draft == "none":
                against[f"{backend}, {'captured' if graph else 'eager'}"] = texts
            found = compare(self.model, self.prompts, texts, against, self.config(backend, draft, graph))
            yield {**row, **self._comparison(found, statistics)}

    def _comparison(self, found: Agreement, statistics: Statistics) -> dict[str, Any]:
        return {
            "result": "lossless" if found.right else "differs", "wrong_texts": sorted(found.wrong_texts),
            "wrong_logits": found.wrong_logits, "near_ties": found.near_ties, "bound": round(found.bound, 4),
            "gaps": {f"prompt {prompt}, {name}": round(gap, 4) for (prompt, name), gap in found.gaps.items()},
            "lowest_choice": round(max((gap for _, gap in found.choices.values()), default=0.0), 4),
            "transformers_error": _error(found.rounding), "backend_error": _error(found.backend),
            "prompts": len(self.prompts), "tokens": statistics.tokens,
            "mean_accepted": round(statistics.mean_accepted, 3),
        }  # fmt: skip


def _error(error: LogitError | None) -> dict[str, float] | None:
    return None if error is None else {"largest": round(error.largest, 4), "rms": round(error.rms, 5)}


def main() -> int:
    """Decode and compare all settings, print a line for each, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", help="a model's folder or GGUF file; by default the bundled SmolLM2-135M")
    parser.add_argument("--backends", nargs="+", default=["cuda_triton", "cuda_flashinfer", "cuda_trtllm"])
    parser.add_argument("--baseline", default="cuda_triton")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16"])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args, commit = parser.parse_args(), origin.commit()
    rows: list[dict[str, Any]] = []
    about = {"schema": 2, "commit": commit, "torch": torch.__version__, "baseline": args.baseline}
    about["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    for dtype in args.dtypes:
        bench = Bench.of(load_model(args.model, dtype=dtype, device=args.device), args)
        for backend in args.backends:
            for row in bench.rows(backend):
                rows.append(row)
                name = f"{row['backend']:16} {row['dtype']:9} {row['draft']:6} {'graph' if row['graph'] else 'eager'}"
                print(f"{name} {row['result']}, {row.get('near_ties', 0)} near ties", flush=True)
                origin.write(args.json, {**about, "rows": rows})  # write after every row, in case the machine is lost
    return int(any(row["result"] == "differs" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
