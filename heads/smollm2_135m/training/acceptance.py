"""Accepted length of chains, from one teacher-forced pass over known answers.

While a chain's guesses are right, its inputs are the text's own tokens. So unrolling the head on the text gives exactly
the guesses of decoding, and the rounds are counted afterwards. `in_top4` counts a guess as right if the text's token is
among the four best of its step. No tree with four branches can keep more, whatever its budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftmark_speculative.eagle import DraftHead
from draftmark_speculative.models import CausalLM

from .text import Sample
from .unroll import DenseForward, collate, unroll


@torch.no_grad()
def acceptance(model: CausalLM, head: DraftHead, samples: Sequence[Sample], steps: int) -> dict[str, Any]:
    """Return the mean accepted length of chains of `steps` guesses, and its upper bound for trees with topk 4."""
    taps, weight = model.tap(head.config.feature_layers), head.output_rows(model.lm_head)
    kept = {"chain": [0, 0], "in_top4": [0, 0]}
    for sample in samples:
        ranks = _ranks(model, head, taps, weight, sample, steps)
        for name, limit in (("chain", 1), ("in_top4", 4)):
            tokens, rounds = _walk((ranks < limit).tolist(), sample)
            kept[name][0] += tokens
            kept[name][1] += rounds
    return {
        "num_steps": steps, "prompts": len(samples), "tokens": kept["chain"][0],
        **{name: round(tokens / rounds, 3) for name, (tokens, rounds) in kept.items()},
    }  # fmt: skip


def _ranks(
    model: CausalLM, head: DraftHead, taps: Any, weight: torch.Tensor, sample: Sample, steps: int
) -> torch.Tensor:
    """Return int64 ``[steps, length]``: rank of the text's token p + 2 + j among the draft tokens, at step j and row p.

    Rank 0 is the best score. The rank is the size of the draft vocabulary if the token is not in it or no token
    follows.
    """
    length = len(sample.tokens)
    tokens = collate([[sample]]).tokens[:, :length].to(model.device)
    positions = torch.arange(length, device=model.device)
    last = positions[-1:]
    _, features = model.forward_features(tokens[0], positions, DenseForward(model, 1), taps, last)
    dtype = next(head.parameters()).dtype
    embeddings = model.embed(tokens).to(dtype)
    to_draft = torch.full((model.vocab_size,), -1, device=model.device)
    to_draft[head.target_tokens(torch.arange(len(weight), device=model.device))] = torch.arange(
        len(weight), device=model.device
    )
    out = torch.full((steps, length), len(weight), device=model.device)
    for step, hidden in enumerate(unroll(head, embeddings, features[None].to(dtype), steps)):
        rows = length - 2 - step
        if rows < 1:
            break
        scores = head.logits(hidden[0, :rows], weight).float()
        true = to_draft[tokens[0, 2 + step :]]
        found = (scores > scores.gather(1, true.clamp(min=0)[:, None])).sum(1)
        out[step, :rows] = torch.where(true < 0, len(weight), found)
    return out


def _walk(right: list[list[bool]], sample: Sample) -> tuple[int, int]:
    """Return tokens and rounds: the prefill gives the first token, each round the right guesses and one more."""
    row, tokens, rounds = sample.prompt_len - 1, 0, 0
    left = len(sample.answer) - 1
    while tokens < left:
        drafts = next((step for step in range(len(right)) if not right[step][row]), len(right))
        count = min(drafts + 1, left - tokens)  # the last round may yield a token after the end of the text
        row, tokens, rounds = row + count, tokens + count, rounds + 1
    return tokens, rounds
