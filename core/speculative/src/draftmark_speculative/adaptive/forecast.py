"""Forecast of the tokens that a round yields with a number of rows, from past rounds. Numbers only, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

LOOK_BACK = 16.0
"""Length of the average over reports, in rounds of one request.

A single request needs many rounds, because its drafts vary. A large batch is averaged over two rounds, because its
texts have changed before that."""
FIRST_ROUNDS, FIRST_DRAFTED = 3, 24
"""Number of rounds, and of trees in them, that draft whatever the forecast is.

Otherwise a head with too low probabilities would never be tried. A single request's unlucky first drafts would be the
only evidence: with 12 trees, one of 14 simulated runs with a good head stopped drafting, with 24 one of 50."""
MOST_TRUST = 4.0
"""Largest `trust`. It exceeds 1 so that a successful probe after a bad stretch raises the forecast at once."""
TRUST_ROUNDS = 24.0
"""Length of the average of `trust`, in rounds of one request.

A large batch has this in one round. For a single request it is long enough that a stretch of bad luck does not count as
evidence; with 6 rounds it did in one of 16 runs."""
TRUST_KEPT = 0.9
"""Decay factor of the evidence for `trust` in a round without drafts."""
TRUST_PRIOR = 1.0
"""Weight of the prior `trust` of 1, in expected drafts."""


def grid(num_draft_tokens: int) -> tuple[float, ...]:
    """Return the numbers of rows per request for which a round reports expected tokens; dense for small budgets."""
    points = [1.0, 1.125, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0]
    while points[-1] < num_draft_tokens:
        points.append(points[-1] + max(1.0, points[-1] // 4))
    return (*(point for point in points if point < num_draft_tokens), float(num_draft_tokens))


class Forecast:
    """Predicts the tokens per request that a round yields with a number of rows per request.

    Reports of past rounds are averaged, and scaled by the accepted share of the expected drafts. The function is
    concave, because the likeliest drafts get the first rows. So a straight line between two points underestimates it.
    Beyond the last point it is constant.

    Args:
        points: numbers of rows per request, ascending from 1.
    """

    def __init__(self, points: Sequence[float]) -> None:
        self.points = tuple(points)
        self._values: list[float] = []
        self._reports = self._trees = 0
        self._averaged = self._promised = self._came = self._seen = 0.0

    @property
    def known(self) -> bool:
        """True once past rounds contain enough drafts for a forecast."""
        return self._reports >= FIRST_ROUNDS and self._trees >= FIRST_DRAFTED

    @property
    def trust(self) -> float:
        """Ratio of accepted to expected drafts. It scales forecasts, because the highest one is usually too high."""
        return min(MOST_TRUST, (self._came + TRUST_PRIOR) / (self._promised + TRUST_PRIOR))

    def learn(self, values: Sequence[float], rows: int, requests: int, accepted: float) -> None:
        """Add a round's report (expected tokens) and its result (accepted tokens).

        Args:
            values: expected tokens per request, for each of `points`.
            rows: rows of the round.
            requests: requests of the round.
            accepted: tokens that the round yielded for all its requests.
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
        """Decay the averages for `rounds` rounds without drafts, so that the next round with drafts counts more."""
        kept = TRUST_KEPT**rounds
        self._averaged *= kept
        self._promised, self._came, self._seen = kept * self._promised, kept * self._came, kept * self._seen

    def tokens(self, rows: int, requests: int) -> float:
        """Return the expected tokens of a round; one token per request before the first report."""
        each = self._at(self._values, rows / requests) if self._values else 1.0
        return requests * (1.0 + (each - 1.0) * self.trust)

    def _at(self, values: Sequence[float], rows: float) -> float:
        points = self.points
        above = bisect_left(points, rows)
        if above == 0 or above == len(points):
            return values[min(above, len(points) - 1)]
        share = (rows - points[above - 1]) / (points[above] - points[above - 1])
        return values[above - 1] + (values[above] - values[above - 1]) * share
