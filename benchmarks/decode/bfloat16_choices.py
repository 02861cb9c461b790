"""How far rounding alone moves a greedy choice: transformers' own forward in bfloat16 against the same in float32.

    python -m benchmarks.decode.bfloat16_choices --json benchmarks/results/bfloat16-choices.json

Held-out prompts are laid end to end, and at every position SmolLM2-135M chooses a token in either dtype, with no kernel
of this project. Where the choices part, the gap is what float32 prefers its own by. `end_to_end` reports the same
gap where texts part.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import origin
from draftmark_speculative.models import load_model
from heads.smollm2_135m.training.prompts import HELD_OUT
from heads.smollm2_135m.training.text import chat, laid_end_to_end

CHUNK = 512
"""Positions whose logits are held at once."""


def main() -> None:
    """Compare both forwards on some rows of prompts and write the result."""
    args, commit = _arguments(), origin.commit()
    exact, rounded = (load_model(args.model, dtype=dtype, device=args.device) for dtype in ("float32", "bfloat16"))
    prompts = chat(exact, HELD_OUT)
    rows = []
    for number in range(args.rows):
        first = number * len(prompts) // args.rows
        ids = laid_end_to_end(prompts, first, args.context)
        gaps = _gaps(exact.hf, rounded.hf, torch.tensor([ids], device=args.device))
        rows.append({
            "first_prompt": first, "positions": len(ids), "parted": int((gaps > 0).sum()),
            "largest_gaps": [round(gap, 3) for gap in gaps.topk(5).values.tolist()],
        })  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
    about = {
        "schema": 1, "commit": commit, "model": exact.name, "device": origin.device_name(args.device),
        "torch": torch.__version__,
    }  # fmt: skip
    origin.write(args.json, {**about, "rows": rows})


@torch.inference_mode()
def _gaps(exact: Any, rounded: Any, ids: torch.Tensor) -> torch.Tensor:
    """float32 ``[positions]``: the best logit in float32 less that of bfloat16's choice; 0 where they agree."""
    wide, narrow = (model.model(ids, use_cache=False).last_hidden_state[0] for model in (exact, rounded))
    gaps = []
    for a, b in zip(wide.split(CHUNK), narrow.split(CHUNK), strict=True):
        logits, chosen = exact.lm_head(a), rounded.lm_head(b).argmax(-1)
        gaps.append(logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0])
    return torch.cat(gaps)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--model", help="SmolLM2's folder or GGUF file; the bundled one without it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=3, help="each from another prompt on")
    parser.add_argument("--context", type=int, default=7680, help="tokens of a row")
    return parser.parse_args()


if __name__ == "__main__":
    main()
