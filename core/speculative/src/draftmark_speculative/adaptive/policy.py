"""Choice of the next round: plain decoding, or drafts under a row budget. Numbers only, no torch.

A round's value is its expected tokens a second: ``(requests + sum of its drafts' acceptance probabilities) / seconds``.
The device picks the likeliest drafts. The host chooses only the number of rows (budget), from earlier rounds' reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .costs import CostTable

Tokens = Callable[[int], float]
"""Function ``tokens(budget)``: expected tokens of a round with `budget` rows, the target's own tokens included."""


@dataclass(frozen=True)
class Load:
    """Requests and context that a round serves.

    Attributes:
        live: number of requests.
        padded: smallest captured batch size for the requests.
        kv_tokens: upper bound, known to the host, of the committed tokens of all requests.
    """

    live: int
    padded: int
    kv_tokens: float


@dataclass(frozen=True)
class Choice:
    """A round and its expected result.

    Attributes:
        budget: rows to verify; None decodes plainly.
        tokens: expected tokens.
        seconds: expected seconds.
    """

    budget: int | None
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


def plain(table: CostTable, load: Load) -> Choice:
    """Return plain decoding as a `Choice`, with its expected tokens and seconds."""
    return Choice(None, float(load.live), table.decode(load.padded, load.kv_tokens))


def drafted(table: CostTable, budgets: Sequence[int], load: Load, tokens: Tokens) -> Choice | None:
    """Return the round with drafts that yields the most tokens a second; None if no budget is large enough."""
    found = [
        Choice(budget, tokens(budget), table.speculate(budget, load.padded, load.kv_tokens))
        for budget in budgets
        if budget >= load.padded and budget > load.live
    ]
    return max(found, key=lambda one: one.rate, default=None)


UPKEEP_SHARE = 0.01
"""Share of the time of plain rounds in which the draft head may process its backlog while nothing is drafted."""
STAY = 16
"""Number of rounds over which drafting must earn the cost of catching up.

Without this limit, switches near the break-even point would pay that cost again and again."""


class Policy:
    """Chooses plain decoding or a row budget for each round.

    While drafts do not pay off, some rounds (probes) still try them. A probe yields at least one token per request,
    like a plain round. So its extra cost is at most the probe's seconds minus a plain round's, plus the head's time
    for its backlog. Each plain round adds time to two allowances: one for probes, one for the head's backlog. A probe
    empties the backlog, so it spends the backlog's allowance first. Otherwise one request would decode about 300 plain
    rounds between two probes.

    Args:
        budgets: numbers of rows that can be verified, ascending.
        probe_share: share of the seconds of plain rounds that probes may cost.
    """

    def __init__(self, table: CostTable, budgets: Sequence[int], probe_share: float) -> None:
        self.table, self.budgets, self._share = table, tuple(budgets), probe_share
        self._saved = self._upkeep = 0.0

    def start(self, load: Load) -> int | None:
        """Return the largest row budget, for a first round without a forecast, so that drafts of every depth are tried.

        Return None if no budget has a row for each padded request and at least one draft.
        """
        return max((b for b in self.budgets if b >= load.padded and b > load.live), default=None)

    def decide(self, load: Load, tokens: Tokens, waiting: int = 0) -> int | None:
        """Return the row budget of the next round, or None for plain decoding.

        Args:
            waiting: rows that the head must process before it drafts.
        """
        without, best = plain(self.table, load), drafted(self.table, self.budgets, load, tokens)
        catching_up = self.table.catch_up(load.padded, waiting)
        if best is not None and best.tokens > without.rate * (best.seconds + catching_up / STAY):
            return best.budget
        self._saved += self._share * without.seconds
        self._upkeep += UPKEEP_SHARE * without.seconds
        if best is None:
            return None
        cost = max(0.0, best.seconds + catching_up - without.seconds)
        upkeep = min(catching_up, self._upkeep, cost)
        if cost - upkeep > self._saved:
            return None
        self._saved -= cost - upkeep
        self._upkeep -= upkeep
        return best.budget

    def keeps_up(self, load: Load, waiting: int) -> bool:
        """Deduct the head's time for `waiting` rows from the allowance; if that is too short, only return False."""
        cost = self.table.catch_up(load.padded, waiting)
        if cost > self._upkeep:
            return False
        self._upkeep -= cost
        return True
