"""Near-ties: where a rounded model may choose another token without anything being wrong.

In float32 a text must equal its baselines. In bfloat16 and float16 two correct kernels round differently, and where
the two best logits nearly tie they choose differently. So a first difference is put to a float32 copy of the same
weights: it is excused when both tokens' logits lie within `bound` of the largest, twice the error that the backend's
own best logits show in this run. A backend with error e can choose no token that lies further down.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import EngineConfig
from ..models import CausalLM
from ..score import score
from .checking import Baseline, Tokens
from .decoding import Decoded

CONTENDERS = 10
"""Logits of a row that may be chosen; the error of those far down, twice as large, says nothing about a choice."""


@dataclass(frozen=True)
class Ties:
    """What the first differences of one run are held against.

    Attributes:
        error: largest difference between a logit of the backend and the float32 one, over the `CONTENDERS` best of
            each choice that the differing texts made, up to where they differ.
        gaps: by (prompt, baseline name), how far below the largest float32 logit the lower of the two tokens lies.
    """

    error: float = 0.0
    gaps: dict[tuple[int, str], float] = field(default_factory=dict)

    @property
    def bound(self) -> float:
        """Gaps below it are ties."""
        return 2 * self.error

    def excuses(self, prompt: int, baseline: str) -> bool:
        """Whether this prompt's first difference from this baseline is a near-tie."""
        gap = self.gaps.get((prompt, baseline))
        return gap is not None and gap < self.bound


def near_ties(
    model: CausalLM,
    prompts: Sequence[Sequence[int]],
    decoded: Decoded,
    baselines: Sequence[Baseline],
    config: EngineConfig,
) -> Ties:
    """Gaps of all first differences, and the backend's logit error on the texts before them.

    Nothing is excused in float32, nor where texts were sampled.
    """
    if model.dtype is torch.float32 or not config.sampling.greedy:
        return Ties()
    exact: Any = None
    error, gaps = 0.0, {}
    for prompt, name, at, other in _splits(decoded, baselines):
        exact = _in_float32(model.hf) if exact is None else exact
        ours = decoded.outputs[prompt].tokens
        text, first = [*prompts[prompt], *ours[:at]], len(prompts[prompt]) - 1
        with torch.inference_mode():
            want = exact(torch.tensor([text], device=model.device), use_cache=False).logits[0, first:]
        best = want.topk(min(CONTENDERS, want.shape[1])).indices
        errors = (score(model, text, config)[first:] - want).gather(1, best).abs()
        error = max(error, float(errors.max()))
        gaps[prompt, name] = float(want[-1].max() - want[-1][[ours[at], other[at]]].min())
    return Ties(error, gaps)


def _splits(decoded: Decoded, baselines: Sequence[Baseline]) -> Iterator[tuple[int, str, int, Tokens]]:
    """Prompt, baseline, place and the baseline's tokens of each first difference between two tokens."""
    for baseline in baselines:
        for prompt, at in enumerate(baseline.differences(decoded)):
            both = (decoded.outputs[prompt].tokens, baseline.outputs[prompt])
            if at is not None and at < min(map(len, both)):
                yield prompt, baseline.name, at, both[1]


def _in_float32(hf: Any) -> Any:
    # transformers' own float() refuses a model that came from GGUF, though its weights are unpacked.
    return torch.nn.Module.float(copy.deepcopy(hf))
