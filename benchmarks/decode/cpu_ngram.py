"""N-gram drafts on a CPU: tokens/s with and without drafts, and of transformers, in one process.

    python -m benchmarks.decode.cpu_ngram --json benchmarks/results/cpu-ngram.json

The contenders alternate on every prompt, so a drift of the machine affects all of them; medians are reported. Engines
are made and graphs captured before the clock starts. A row records whether all texts are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from benchmarks.prompts import fixed_set
from draftmark_speculative import Engine, EngineConfig, Ngram, decode
from draftmark_speculative.models import CausalLM, load_model
from heads.smollm2_135m.training.text import chat

MAX_NEW_TOKENS = 64


def prompts() -> list[dict[str, Any]]:
    """Return two prompt sets: the demo's prompts, which benefit from drafts, and the fixed set, which benefits less."""
    demo = [text.strip() for text in (origin.PROMPTS / "demo.txt").read_text().split("\n---\n")]
    rows: list[dict[str, Any]] = [
        {"name": f"demo-{i}", "pays": True, "set": "demo", "prompt": text} for i, text in enumerate(demo, 1)
    ]
    return rows + [{**row, "set": "benchmark"} for row in fixed_set()]


def ours(model: CausalLM, batch: Sequence[Sequence[int]], speculate: Ngram | None, graph: bool) -> Callable[[], Any]:
    """Return a function that runs draftmark's engine: () -> (tokens by prompt, mean accepted length, seconds)."""
    longest = max(map(len, batch)) + MAX_NEW_TOKENS
    config = EngineConfig(
        speculate=speculate, graph=graph, max_num_reqs=len(batch), max_context_len=-(-longest // 16) * 16, page_size=16
    )

    def run() -> tuple[list[tuple[int, ...]], float, float]:
        engine = Engine(model, config)
        start = time.perf_counter()
        outputs = decode(engine, batch, MAX_NEW_TOKENS)
        seconds = time.perf_counter() - start
        return [o.tokens for o in outputs], engine.statistics.mean_accepted, seconds

    return run


def transformers(model: CausalLM, batch: Sequence[Sequence[int]]) -> Callable[[], Any]:
    """Return a function that runs transformers' greedy `generate` on one prompt after another, with its KV cache."""
    stop = model.stop_token_ids[0]

    def run() -> tuple[list[tuple[int, ...]], float, float]:
        start, texts = time.perf_counter(), []
        for prompt in batch:
            ids = torch.tensor([list(prompt)])
            with torch.inference_mode():
                out = model.hf.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_NEW_TOKENS, do_sample=False,
                    eos_token_id=stop, pad_token_id=stop,
                )  # fmt: skip
            texts.append(tuple(out[0, len(prompt) :].tolist()))
        return texts, 1.0, time.perf_counter() - start

    return run


def measure(
    model: CausalLM, batch: Sequence[Sequence[int]], drafts: Ngram, graph: bool, repeats: int
) -> dict[str, Any]:
    """Return one row: median tokens/s of plain decoding, drafts and transformers, over alternating runs."""
    contenders = {
        "plain": ours(model, batch, None, graph),
        "ngram": ours(model, batch, drafts, graph),
        "transformers": transformers(model, batch),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    texts: dict[str, Any] = {}
    accepted = 0.0
    for _ in range(repeats):
        for name, run in contenders.items():
            texts[name], mean, took = run()
            seconds[name].append(took)
            accepted = mean if name == "ngram" else accepted
    tokens = sum(map(len, texts["plain"]))
    speed = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    return {
        "tokens": tokens,
        "plain_tokens_per_s": round(speed["plain"], 2),
        "ngram_tokens_per_s": round(speed["ngram"], 2),
        "transformers_tokens_per_s": round(speed["transformers"], 2),
        "ngram_over_plain": round(speed["ngram"] / speed["plain"], 3),
        "plain_over_transformers": round(speed["plain"] / speed["transformers"], 3),
        "mean_accepted": round(accepted, 3),
        "identical": texts["plain"] == texts["ngram"] == texts["transformers"],
    }


def provenance() -> dict[str, Any]:
    """Return commit, machine and versions."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in info if "model name" in line), platform.processor())
    return {
        "commit": origin.commit(),
        "device": f"{cpu}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": origin.versions("draftmark", "torch", "transformers", "numpy"),
    }


def main() -> None:
    """Measure all cases, print each row, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--num-draft-tokens", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--graph", action="store_true")
    args = parser.parse_args()
    model, drafts = load_model(None), Ngram(args.topk, args.num_draft_tokens)
    measure(model, chat(model, ["Hello"]), drafts, args.graph, 1)  # warm-up; the result is not used
    rows = []
    cases = [([row], row["name"]) for row in prompts()]
    cases.append(([row for row in prompts() if row["set"] == "demo"], "demo-together"))
    for group, name in cases:
        ids = chat(model, [row["prompt"] for row in group])
        result = measure(model, ids, drafts, args.graph, args.repeats)
        rows.append({"case": name, "set": group[0]["set"], "pays": group[0]["pays"], "batch": len(group), **result})
        print(json.dumps(rows[-1]), flush=True)
    demo = [row for row in rows if row["set"] == "demo" and row["batch"] == 1]
    summary = {
        key: round(statistics.median(row[key] for row in demo), 3)
        for key in ("ngram_over_plain", "plain_over_transformers", "mean_accepted")
    }
    result = {
        "schema": 1, **provenance(), "model": model.name, "dtype": "float32", "graph": args.graph, "topk": args.topk,
        "num_draft_tokens": args.num_draft_tokens, "max_new_tokens": MAX_NEW_TOKENS, "repeats": args.repeats,
        "demo_medians": summary, "rows": rows,
    }  # fmt: skip
    print(json.dumps(summary))
    origin.write(args.json, result)


if __name__ == "__main__":
    main()
