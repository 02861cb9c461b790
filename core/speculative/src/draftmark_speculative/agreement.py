"""Whether texts are their model's own, rounding apart: one rule for the command line, benchmarks and device tests.

In float32 a text must equal its baselines token for token. In bfloat16 and float16 two right kernels round differently,
and where the best two logits nearly tie they choose differently. How far rounding moves a logit is measured **without
the backend**: transformers' own forward in the model's dtype against a float32 copy of the same weights, on the same
texts. Three things are held against it:

* every token of a greedy text: its float32 logit lies less than `Agreement.bound` below the best of its row;
* a first difference from a baseline: so does the baseline's token;
* the backend's logits of the same texts, by one prefill each: their error is at most `SLACK` times transformers' own.

A tolerance taken from the backend itself would excuse every backend, for a wrong one has a large error. `compare`
measures; this module judges, and needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

SLACK = 2.0
"""A right backend's error over transformers' own, root mean squares. Measured 0.7 to 1.6 over some 40 logits and 0.85
to 1.1 over 600; backends that scale their output by 0.9 or add noise of 0.05 have 2.5 and more in bfloat16."""
CAP = 64
"""Most that transformers' own error may excuse, in units of eps · the spread of a row's logits. Measured 3 to 30."""


@dataclass(frozen=True)
class LogitError:
    """How far a forward's logits lie from float32's, over the best few of every row."""

    largest: float
    rms: float


@dataclass(frozen=True)
class Agreement:
    """What was found of some texts.

    Attributes:
        differences: by (prompt, baseline), index of the first token that differs, or that only one side has.
        dtype: of the model, for messages.
        rounding: transformers' own error in that dtype; None in float32, where nothing is excused.
        cap: the most of it that is taken for rounding.
        backend: the backend's error; None where it was not measured.
        gaps: by (prompt, baseline), how far below the best float32 logit the lower of the two first tokens lies.
        choices: by prompt, the token of the text that lies furthest below the best: (index, how far).
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
        """Gaps below it are near-ties: twice transformers' own largest error, or twice the cap; 0 excuses nothing."""
        if self.rounding is None or not math.isfinite(self.rounding.largest):
            return 0.0
        return 2 * min(self.rounding.largest, self.cap)

    def excuses(self, prompt: int, baseline: str) -> bool:
        """Whether this prompt's first difference from this baseline is a near-tie."""
        return self.gaps.get((prompt, baseline), math.inf) < self.bound

    @property
    def near_ties(self) -> int:
        """First differences that are excused."""
        return sum(self.excuses(*where) for where in self.differences)

    @property
    def wrong_choices(self) -> dict[int, tuple[int, float]]:
        """By prompt, a token that no rounding explains: (index, how far below the best)."""
        return {prompt: choice for prompt, choice in self.choices.items() if not choice[1] < self.bound}

    @property
    def wrong_texts(self) -> set[int]:
        """Prompts whose text is wrong: a token of it, or a first difference that is no near-tie."""
        return {where[0] for where in self.differences if not self.excuses(*where)} | set(self.wrong_choices)

    @property
    def wrong_logits(self) -> str | None:
        """What is wrong with the backend's logits, in one sentence; None when nothing is, or none were measured."""
        if self.rounding is None or self.backend is None:
            return None
        if not math.isfinite(self.rounding.rms):
            return f"transformers' own logits are not finite in {self.dtype}, so nothing can be checked; use float32"
        if self.backend.rms <= SLACK * self.rounding.rms:
            return None
        return (
            f"the backend's logits lie {self.backend.rms:.3g} from a float32 model's (root mean square), but "
            f"transformers' own lie {self.rounding.rms:.3g} away in {self.dtype}, and {SLACK:g} times that is the "
            "limit; run `draftmark contract` on the backend"
        )

    @property
    def right(self) -> bool:
        """Whether neither a text nor the logits are wrong."""
        return not self.wrong_texts and self.wrong_logits is None
