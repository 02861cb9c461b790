"""Which round to send: plain decoding, or drafts under a budget of rows. Numbers only, no torch.

A round is worth its expected tokens a second, ``(R + sum of the admitted drafts' survival) / seconds``. The drafts are
admitted on the device, likeliest first; what the host chooses is the budget, from what earlier rounds have said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .costs import CostTable

Tokens = Callable[[int], float]
"""``tokens(budget)``: expected tokens of a round with so many rows, the target's own included."""


@dataclass(frozen=True)
class Load:
    """What a round is for.

    Attributes:
        live, padded: requests, and those of the captured batch that holds them.
        kv_tokens: committed tokens of all of them, as far as the host knows.
    """

    live: int
    padded: int
    kv_tokens: float


@dataclass(frozen=True)
class Choice:
    """A round, and what is expected of it.

    Attributes:
        budget: rows to verify; None decodes plainly.
        tokens, seconds: expected.
    """

    budget: int | None
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds


def plain(table: CostTable, load: Load) -> Choice:
    """The round without drafts."""
    return Choice(None, float(load.live), table.decode(load.padded, load.kv_tokens))


def drafted(table: CostTable, budgets: Sequence[int], load: Load, tokens: Tokens) -> Choice | None:
    """The best round with drafts; None where no budget holds the padded batch and a draft."""
    found = [
        Choice(budget, tokens(budget), table.speculate(budget, load.padded, load.kv_tokens))
        for budget in budgets
        if budget >= load.padded and budget > load.live
    ]
    return max(found, key=lambda one: one.rate, default=None)


UPKEEP_SHARE = 0.01
"""Of the time of plain rounds, what may go into keeping a head ready that drafts nothing."""
STAY = 16
"""Rounds over which a return to drafts has to earn what catching up costs: near the point where drafts cease to pay,
every change of mind would pay it again."""


class Policy:
    """Chooses rounds, and probes when drafts have not paid: no oftener than `probe_share` of the time allows.

    A probe yields a token a request at least, as a plain round does, so it costs at most the difference of the two, and
    what the head has to read first. Plain rounds save up for it.

    Args:
        budgets: rows that can be verified, ascending.
        probe_share: of the seconds of plain rounds, what probes may cost.
    """

    def __init__(self, table: CostTable, budgets: Sequence[int], probe_share: float) -> None:
        self.table, self.budgets, self._share = table, tuple(budgets), probe_share
        self._saved = self._upkeep = 0.0

    def start(self, load: Load) -> int | None:
        """The budget of a first round, about which nothing is known: the largest, so that every depth is tried once.

        None where no budget holds the batch.
        """
        return max((b for b in self.budgets if b >= load.padded and b > load.live), default=None)

    def decide(self, load: Load, tokens: Tokens, waiting: int = 0) -> int | None:
        """The budget of the next round; None decodes plainly.

        Args:
            waiting: rows that the head has to read before it drafts.
        """
        without, best = plain(self.table, load), drafted(self.table, self.budgets, load, tokens)
        behind = self.table.catch_up(load.padded, waiting)
        if best is not None and best.tokens > without.rate * (best.seconds + behind / STAY):
            return best.budget
        self._saved += self._share * without.seconds
        self._upkeep += UPKEEP_SHARE * without.seconds
        if best is None or best.seconds + behind - without.seconds > self._saved:
            return None
        self._saved -= max(0.0, best.seconds + behind - without.seconds)
        return best.budget

    def keeps_up(self, load: Load, waiting: int) -> bool:
        """Whether plain rounds have saved what it costs that the head reads `waiting` rows now, which is then spent."""
        cost = self.table.catch_up(load.padded, waiting)
        if cost > self._upkeep:
            return False
        self._upkeep -= cost
        return True
