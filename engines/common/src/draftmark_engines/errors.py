"""Errors of the adapters: a need that is not served, before a model loads, and ranks with different steps."""

from __future__ import annotations

from collections.abc import Sequence

from draftmark import DraftmarkError


class EngineError(DraftmarkError):
    """Error for an engine's needs that draftmark cannot serve. One sentence: thing, value, limit and remedy."""


class RanksDisagree(DraftmarkError):
    """Ranks of one group hold different metadata for one step.

    Attributes:
        part: name of the metadata that differs, one of `draftmark_engines.ranks.PARTS`.
        ranks: ranks with a value different from rank 0.
    """

    def __init__(self, part: str, ranks: Sequence[int], step: int) -> None:
        self.part, self.ranks = part, tuple(ranks)
        super().__init__(
            f"ranks {', '.join(map(str, ranks))} differ from rank 0 in the {part} of step {step}; decide it on "
            "one rank and send it to the others before the step"
        )
