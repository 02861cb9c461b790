"""Choice of the target's token for every row: the argmax or a sample.

The random number is a pure function of (seed, request, position), not a stream. So the token sampled at a position
does not depend on how the engine reached that position. Speculative sampling gives exactly the tokens of plain
sampling, and one test covers greedy and sampled decoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmark import RequestError

from .arguments import is_number

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class Sampling:
    """Settings for choosing the target's token.

    Attributes:
        temperature: divisor of the logits; 0 is greedy.
        top_p: a token is drawn from the smallest set of most likely tokens with at least this probability; 1 keeps all.
        seed: seed of the whole engine; the id of each request is mixed in.

    Raises:
        RequestError: a value is not a number, is NaN, or is out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("temperature", (int, float)), ("top_p", (int, float)), ("seed", (int,))):
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                wanted = "an integer" if kind == (int,) else "a number"
                raise RequestError(f"{name} is {value!r}, but it must be {wanted}; use the default")
        if not (is_number(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}, but it must be finite and >= 0; use 0 for greedy")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}, but it must be in (0, 1]; use 1 to keep every token")

    @property
    def greedy(self) -> bool:
        """True if temperature is 0, so that the most likely token is chosen."""
        return self.temperature == 0

    def choose(self, logits: torch.Tensor, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Choose one token for each row. Capturable.

        Args:
            logits: float32 ``[rows, vocab_size]``.
            requests: int64 ``[rows]``, id of the request that each row belongs to.
            positions: int64 ``[rows]``, position of the row's own token.

        Returns:
            int64 ``[rows]``.
        """
        if self.greedy:
            return logits.argmax(-1)
        # Shift the best logit to 0 before dividing: a tiny temperature would make it infinite and the softmax NaN.
        logits = logits.double()
        probs = ((logits - logits.amax(-1, keepdim=True)) / self.temperature).softmax(-1)
        if self.top_p < 1:
            likeliest, tokens = probs.sort(dim=-1, descending=True, stable=True)
            outside = likeliest.cumsum(-1) - likeliest >= self.top_p
            probs = probs.scatter(-1, tokens, likeliest.masked_fill(outside, 0.0))
        # Draw in token-id order. In probability order, two tokens that differ in the last bit could swap places
        # between two correct forwards and change the text.
        mass = probs.cumsum(-1)
        draw = uniform(self.seed, requests, positions)[:, None] * mass[:, -1:]
        chosen: torch.Tensor = torch.searchsorted(mass, draw, right=True).clamp(max=logits.shape[-1] - 1)[:, 0]
        return chosen


def uniform(seed: int, requests: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return a float64 in [0, 1) for each row: splitmix64 (Steele et al. 2014) of (seed, request, position)."""
    seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
    state = _splitmix(requests * _GOLDEN + seed)
    state = _splitmix(state + positions * _GOLDEN)
    return (_shift(state, 11)).double() * 2.0**-53


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift int64 right logically; torch's own shift is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
