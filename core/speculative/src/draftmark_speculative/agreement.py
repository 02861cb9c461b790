"""Rule that decides if generated texts match their model, except for rounding.

The command line, the benchmarks and the device tests share this rule.

In float32 a text must equal its baselines token for token. In bfloat16 and float16 two correct kernels round
differently. They may choose different tokens where the best two logits nearly tie. The allowed rounding error is
measured **without the backend**: transformers' own forward in the model's dtype is compared with a float32 copy of the
same weights, on the same texts. Three checks use this error:

* Every token of a greedy text: its float32 logit lies less than `Agreement.bound` below the best logit of its row.
* A first difference from a baseline: the baseline's token also lies within this bound.
* The backend's logits of the texts, from one prefill each: their error is at most `SLACK` times transformers' own.

A tolerance derived from the backend would accept every backend, because a wrong backend has a large error. The module
`compare` measures. This module only decides, and needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

SLACK = 2.0
"""Most that a backend's error may be, as a multiple of transformers' own error (root mean squares).

Correct backends measured 0.7 to 1.6 over about 40 logits and 0.85 to 1.1 over 600. Backends that scale their output by
0.9 or add noise of 0.05 measured 2.5 or more in bfloat16."""
CAP = 64
"""Cap on the error of transformers' own forward that counts as rounding.

Unit: eps · standard deviation of a row's logits. Measured values are 3 to 30."""


@dataclass(frozen=True)
class LogitError:
    """Errors of a forward's logits against float32 logits, over the best few logits of every row."""

    largest: float
    rms: float


@dataclass(frozen=True)
class Agreement:
    """Result of comparing texts with their baselines and with a float32 copy of the model.

    Attributes:
        differences: by (prompt, baseline), index of the first token that differs or that only one text has.
        dtype: the model's dtype, for messages.
        rounding: error of transformers' own forward in that dtype; None in float32, where texts must be equal.
        cap: most of that error that counts as rounding.
        backend: the backend's error; None if it was not measured.
        gaps: by (prompt, baseline), distance below the best float32 logit, for the lower of the two first tokens
            that differ.
        choices: by prompt, the text's token that lies furthest below the best logit: (index, distance).
    """

    differences: Mapping[tuple[int, str], int] = field(default_factory=dict)
    dtype: str = "float32"
    rounding: LogitError | None = None
    cap: float = 0.0
    backend: LogitError | None = None
    gaps: Mapping[tuple[int, str], float] = field(default_factory=dict)
    choices: Mapping[int, tuple[int, float]] = field(default_factory=dict)

    @property
    def bound(self) -> float:
        """Gap below which two logits are a near-tie: twice transformers' own error, capped. 0 permits no near-tie."""
        if self.rounding is None or not math.isfinite(self.rounding.largest):
            return 0.0
        return 2 * min(self.rounding.largest, self.cap)

    def excuses(self, prompt: int, baseline: str) -> bool:
        """Return True if this prompt's first difference from this baseline is a near-tie."""
        return self.gaps.get((prompt, baseline), math.inf) < self.bound

    @property
    def near_ties(self) -> int:
        """Number of first differences that are near-ties."""
        return sum(self.excuses(*where) for where in self.differences)

    @property
    def wrong_choices(self) -> dict[int, tuple[int, float]]:
        """By prompt: (index, distance below the best logit) of its worst token, if rounding does not explain it."""
        return {prompt: choice for prompt, choice in self.choices.items() if not choice[1] < self.bound}

    @property
    def wrong_texts(self) -> set[int]:
        """Prompts with a wrong text: rounding does not explain a token, or the first difference is not a near-tie."""
        return {where[0] for where in self.differences if not self.excuses(*where)} | set(self.wrong_choices)

    @property
    def wrong_logits(self) -> str | None:
        """Sentence that describes the error in the backend's logits; None if there is no error or no measurement."""
        if self.rounding is None or self.backend is None:
            return None
        if not math.isfinite(self.rounding.rms):
            return f"transformers' own logits are not finite in {self.dtype}, so nothing can be checked; use float32"
        if self.backend.rms <= SLACK * self.rounding.rms:
            return None
        return (
            f"the backend's logits differ from a float32 model's by {self.backend.rms:.3g} (root mean square), but "
            f"transformers' own differ by {self.rounding.rms:.3g} in {self.dtype}, and {SLACK:g} times that is the "
            "limit; run `draftmark contract` on the backend"
        )

    @property
    def right(self) -> bool:
        """True if all texts and the backend's logits are correct."""
        return not self.wrong_texts and self.wrong_logits is None
