"""How many tokens a round would yield, by its rows: what past rounds said, per request. Numbers only, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LOOK_BACK = 16.0
"""Rounds of one request over which promises are averaged, for it is sure of one draft and not of the next. Of a large
batch two rounds are: the one before them was another text already."""
FIRST_ROUNDS, FIRST_DRAFTED = 3, 12
"""Rounds that draft whatever they promise, and trees in them: a head that claims too little would never be tried, and
bad luck of a single request's first drafts would be all that is known of it."""
MOST_TRUST = 4.0
"""Above 1 too: a probe behind a bad stretch promises little, and what it gives says at once that drafts pay again."""
TRUST_ROUNDS = 24.0
"""Rounds of one request over which `trust` looks back: one round of a large batch, and of a single request so many that
a stretch of bad luck is no evidence (over 6, it was in one of 16)."""
TRUST_KEPT = 0.9
"""What remains of that evidence behind a round without drafts."""
TRUST_PRIOR = 1.0
"""Expected drafts for which the forecast is taken at its word before any came true."""


def grid(num_draft_tokens: int) -> tuple[float, ...]:
    """Rows a request at which a round reports its expected tokens: dense where budgets are small."""
    points = [1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0]
    while points[-1] < num_draft_tokens:
        points.append(points[-1] + max(1.0, points[-1] // 4))
    return (*(point for point in points if point < num_draft_tokens), float(num_draft_tokens))


class Forecast:
    """Expected tokens a request over rows a request, smoothed over rounds, and how far it came true.

    It is concave: rows are given to the likeliest drafts first. So a straight line between two points promises less
    than is there, and beyond the last point nothing more is promised.

    Args:
        points: rows a request, ascending from 1.
    """

    def __init__(self, points: Sequence[float]) -> None:
        self.points = tuple(points)
        self._values: list[float] = []
        self._reports = self._trees = 0
        self._averaged = self._promised = self._came = self._seen = 0.0

    @property
    def known(self) -> bool:
        """Whether as much has been drafted as calibration needs to say anything."""
        return self._reports >= FIRST_ROUNDS and self._trees >= FIRST_DRAFTED

    @property
    def trust(self) -> float:
        """Accepted drafts over promised ones: a choice that picks the best promise is disappointed as a rule."""
        return min(MOST_TRUST, (self._came + TRUST_PRIOR) / (self._promised + TRUST_PRIOR))

    def learn(self, values: Sequence[float], rows: int, requests: int, accepted: float) -> None:
        """Take a round's report, and what it gave.

        Args:
            values: expected tokens a request at every point.
            rows: of the round.
            accepted: tokens of all its requests.
        """
        self._reports += 1
        self._trees += requests
        promised = requests * (self._at(values, rows / requests) - 1)
        kept = min(1.0, TRUST_ROUNDS / (self._seen + requests))
        self._seen = kept * (self._seen + requests)
        self._promised = kept * (self._promised + promised)
        self._came = kept * (self._came + accepted - requests)
        self._averaged = min(self._averaged + requests, max(LOOK_BACK, 2.0 * requests))
        old, weight = self._values or values, requests / self._averaged
        self._values = [a + (b - a) * weight for a, b in zip(old, values, strict=True)]

    def age(self, rounds: int) -> None:
        """Let evidence fade by rounds that brought none: a probe then speaks for itself."""
        kept = TRUST_KEPT**rounds
        self._averaged *= kept
        self._promised, self._came, self._seen = kept * self._promised, kept * self._came, kept * self._seen

    def tokens(self, rows: int, requests: int) -> float:
        """Tokens that `rows` rows yield for so many requests; one each where nothing is known."""
        each = self._at(self._values, rows / requests) if self._values else 1.0
        return requests * (1.0 + (each - 1.0) * self.trust)

    def _at(self, values: Sequence[float], rows: float) -> float:
        points = self.points
        above = bisect_left(points, rows)
        if above == 0 or above == len(points):
            return values[min(above, len(points) - 1)]
        share = (rows - points[above - 1]) / (points[above] - points[above - 1])
        return values[above - 1] + (values[above] - values[above - 1]) * share
