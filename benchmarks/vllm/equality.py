"""Texts of one backend against another's: greedy, with what the model thought of each token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .engines import SHAPES, Engine, prompts

LENGTHS = (5, 31, 64, 130, 200, 310)
NEW_TOKENS = 48
NEAR = 0.05
"""Log-probabilities this near are a tie in bfloat16."""


def texts(engine: Engine, folder: Path) -> list[dict[str, Any]]:
    """Tokens of every prompt, and of each token by how much it was ahead of the next best."""
    from vllm import LLM, SamplingParams

    llm = LLM(**engine.arguments(folder))
    vocabulary = SHAPES[engine.shape]["vocab_size"]
    # Every prompt twice over, so that n-gram drafts find something.
    asked = [prompts(1, n, vocabulary, max(4, n // 2))[0] for n in LENGTHS]
    logprobs = None if engine.drafts else 2
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=logprobs
    )
    found = []
    for out in llm.generate(asked, sampling, use_tqdm=False):
        one = out.outputs[0]
        ahead = []
        for entry in one.logprobs or ():
            best, second = sorted((x.logprob for x in entry.values()), reverse=True)[:2]
            ahead.append(best - second)
        found.append({"tokens": list(one.token_ids), "ahead": ahead})
    return found


def compare(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], exact: bool) -> dict[str, Any]:
    """How many texts are equal; of the others, whether the first difference was a near tie of `theirs`."""
    equal = ties = 0
    gaps = []
    for one, other in zip(ours, theirs, strict=True):
        pairs = zip(one["tokens"], other["tokens"], strict=True)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            equal += 1
            continue
        gaps.append(round(other["ahead"][at], 4))
        ties += not exact and other["ahead"][at] < NEAR
    return {"texts": len(ours), "equal": equal, "near_ties": ties, "gaps": gaps, "right": equal + ties == len(ours)}
