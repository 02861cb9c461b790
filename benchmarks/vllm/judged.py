"""Check the texts of a result against float32, and replace their tokens by a verdict.

Usage: ``python -m benchmarks.vllm.judged RESULT.json MODELS``. It needs no engine and no device.

Every token of every text must be the best of its row in float32, or lie below the best by no more than rounding
explains. Where two texts first differ, this must hold for both tokens (`draftmark_speculative.agreement`). For texts
over KV in e4m3 the model reads K and V rounded to e4m3. Sampled texts must equal those of the first engine with equal
dtypes and temperature: the seed and the position decide each sample, whatever the drafts are.

The folder ``MODELS/memorizer`` has the model of the texts, ``MODELS/smollm2`` the model of the draft measurements. A
row that names a checkpoint is judged with that checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from .engines import KV_DTYPES

MODELS = {"equality": "memorizer", "drafting": "smollm2"}
"""Lists of a result that have texts, and the checkpoint of rows that name none."""


def judge(row: dict[str, Any], model: Any, prompts: list[list[int]], theirs: list[list[int]]) -> dict[str, Any]:
    """Judge one engine's texts: their tokens in float32, and their differences from the first engine's texts."""
    from draftmark_speculative.compare import compare

    found = compare(model, prompts, row["tokens"], {"first": theirs})
    return {
        **_verdict(row, len(found.differences), found.near_ties, sorted(found.wrong_texts)),
        "furthest_below_best": round(max((far for _, far in found.choices.values()), default=0.0), 4),
        "bound": round(found.bound, 4),
    }


def judge_sampled(row: dict[str, Any], theirs: list[list[int]]) -> dict[str, Any]:
    """Compare one engine's sampled texts with the first engine's; each text that differs is wrong."""
    pairs = enumerate(zip(row["tokens"], theirs, strict=True))
    others = [number for number, (one, other) in pairs if one != other]
    return _verdict(row, len(others), 0, others)


def _verdict(row: dict[str, Any], others: int, near_ties: int, wrong_texts: list[int]) -> dict[str, Any]:
    """Return a row with counts in place of its tokens; `others` is the number of texts unlike the first engine's."""
    texts = row["tokens"]
    kept = {name: value for name, value in row.items() if name not in ("tokens", "part_at")}
    counts = {"texts": len(texts), "equal": len(texts) - others, "tokens": sum(map(len, texts))}
    return {**kept, **counts, "near_ties": near_ties, "wrong_texts": wrong_texts}


def judge_all(rows: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Check the texts of one model's rows. Compare each row with the first row of equal dtypes and temperature."""
    from draftmark_speculative.models import load_model

    if not rows:
        return []
    prompts, judged = json.loads((folder / "prompts.json").read_text()), []
    for dtype, kv_dtype, temperature in dict.fromkeys(map(_sampled, rows)):
        same = [row for row in rows if _sampled(row) == (dtype, kv_dtype, temperature)]
        theirs = same[0]["tokens"]
        if temperature:
            judged += [judge_sampled(row, theirs) for row in same]
        else:
            model = load_model(folder, dtype=dtype)
            if kv_dtype != "auto":
                read_back(model.hf, getattr(torch, KV_DTYPES[kv_dtype]))
            judged += [judge(row, model, prompts, theirs) for row in same]
    return judged


def read_back(hf: Any, dtype: torch.dtype) -> None:
    """Make a transformers model read K and V as a cache of `dtype` returns them, with scales of one."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **more: Any) -> Any:
        return sdpa_attention_forward(module, q, k.to(dtype).to(k.dtype), v.to(dtype).to(v.dtype), mask, **more)

    name = f"over {dtype}"
    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
    hf.set_attn_implementation(name)


def _sampled(row: dict[str, Any]) -> tuple[str, str, float]:
    """Return the settings that decide a row's tokens: its dtype, its KV dtype and its temperature."""
    return row["dtype"], row.get("kv_dtype", "auto"), row.get("temperature", 0.0)


def main() -> None:
    """Check the generated texts of every row against float32, print the verdicts, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("models", type=Path)
    asked = parser.parse_args()
    result = json.loads(asked.result.read_text())
    for name, checkpoint in MODELS.items():
        rows, judged = result.get(name, []), []
        for one in dict.fromkeys(row.get("checkpoint", checkpoint) for row in rows):
            judged += judge_all([row for row in rows if row.get("checkpoint", checkpoint) == one], asked.models / one)
        result[name] = judged
        for row in judged:
            print({key: row[key] for key in row if key not in ("eager", "all")})
    asked.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
