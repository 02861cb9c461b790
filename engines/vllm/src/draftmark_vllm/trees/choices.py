"""Chooses the target's token after each row: the argmax, or a sample that depends only on request and position.

Random numbers are a function of (seed, position), not a stream. A tree, a chain and a plain step sample equal tokens at
equal positions. So text sampled with trees equals text sampled without trees.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from draftmark_speculative.sampling import uniform


@dataclass(frozen=True)
class Choice:
    """Holds the sampling parameters of one request.

    Attributes:
        temperature: 0 for the argmax.
        top_k: keep the k likeliest tokens; 0 for all.
        top_p: keep the fewest likeliest tokens with this total probability; 1 for all.
        seed: seed of the request.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    @classmethod
    def of(cls, params: Any, request_id: str, engine_seed: int) -> Choice | None:
        """Read vLLM's `SamplingParams`. Return None if the request needs vLLM's own sampler, and so gets no trees."""
        if not _plain(params):
            return None
        seed = params.seed
        if seed is None:  # derived from the request's id and the engine's seed, so that every rank has the same seed
            seed = int.from_bytes(hashlib.sha256(f"{engine_seed} {request_id}".encode()).digest()[:7])
        temperature = float(params.temperature)
        return cls(temperature if temperature >= 1e-5 else 0.0, max(0, params.top_k), float(params.top_p), seed)


def _plain(params: Any) -> bool:
    """Return True if sampling uses only the row's logits, temperature, top_k and top_p."""
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty - 1, params.min_p)
    more = ("logprobs", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "structured_outputs")
    return not any(penalties) and not any(getattr(params, name, None) not in (None, 0, [], {}) for name in more)


def choose(logits: torch.Tensor, choices: list[Choice], positions: torch.Tensor) -> torch.Tensor:
    """Choose one token for each row.

    Args:
        logits: ``[rows, vocabulary]``.
        choices: sampling parameters of each row.
        positions: int64 ``[rows]``, position of each row's input token.

    Returns:
        Chosen tokens, int64 ``[rows]``.
    """
    chosen: torch.Tensor = logits.argmax(-1)
    drawn = [row for row, one in enumerate(choices) if one.temperature]
    if drawn:
        at = torch.tensor(drawn, device=logits.device)
        chosen[at] = _sampled(logits[at], [choices[row] for row in drawn], positions[at])
    return chosen


def _sampled(logits: torch.Tensor, choices: list[Choice], positions: torch.Tensor) -> torch.Tensor:
    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(one, name) for one in choices], device=logits.device)[:, None]

    probs = (logits.double() / column("temperature")).softmax(-1)
    likeliest, tokens = probs.sort(dim=-1, descending=True, stable=True)
    top_k, rank = column("top_k"), torch.arange(logits.shape[-1], device=logits.device)
    likeliest = likeliest.masked_fill((top_k > 0) & (rank >= top_k), 0.0)
    likeliest = likeliest / likeliest.sum(-1, keepdim=True)
    likeliest = likeliest.masked_fill(likeliest.cumsum(-1) - likeliest >= column("top_p"), 0.0)
    # Accumulate in the order of token ids. In sorted order, a difference of one bit could swap two tokens, and then an
    # equal draw would choose another token.
    mass = torch.zeros_like(probs).scatter(-1, tokens, likeliest).cumsum(-1)
    draw = uniform(0, column("seed")[:, 0], positions)[:, None] * mass[:, -1:]
    found: torch.Tensor = torch.searchsorted(mass, draw, right=True).clamp(max=logits.shape[-1] - 1)[:, 0]
    return found
