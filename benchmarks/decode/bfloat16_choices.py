"""Effect of rounding on greedy tokens: transformers' own forward in bfloat16 compared with float32.

    python -m benchmarks.decode.bfloat16_choices --json benchmarks/results/bfloat16-choices.json

Held-out prompts are concatenated. At every position SmolLM2-135M chooses a token in both dtypes, without any kernel of
draftmark. If the tokens differ, the gap is the difference of their float32 logits. `end_to_end` reports that gap for
texts that differ.
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
"""Number of positions with logits in memory at once."""


def main() -> None:
    """Compare the bfloat16 and the float32 forward on concatenated prompts, and write the result."""
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
    """Return float32 ``[positions]``: best float32 logit minus that of bfloat16's token; 0 for equal choices."""
    wide, narrow = (model.model(ids, use_cache=False).last_hidden_state[0] for model in (exact, rounded))
    gaps = []
    for a, b in zip(wide.split(CHUNK), narrow.split(CHUNK), strict=True):
        logits, chosen = exact.lm_head(a), rounded.lm_head(b).argmax(-1)
        gaps.append(logits.max(-1).values - logits.gather(-1, chosen[:, None])[:, 0])
    return torch.cat(gaps)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for the result")
    parser.add_argument("--model", help="folder or GGUF file of SmolLM2; by default the bundled one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, default=3, help="number of rows, which begin at different prompts")
    parser.add_argument("--context", type=int, default=7680, help="tokens per row")
    return parser.parse_args()


if __name__ == "__main__":
    main()
