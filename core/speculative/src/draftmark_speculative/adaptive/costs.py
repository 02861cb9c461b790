"""What a round costs: seconds of each program by its size and the KV that it reads. Numbers only, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from draftmark import RequestError

from ..arguments import check_kind, is_count, is_number


@dataclass(frozen=True)
class Cost:
    """Seconds of one program: a part that is always there, and one for each KV token that its requests have.

    Attributes:
        seconds: with empty prefixes.
        per_token: seconds more for each committed token, summed over the requests.
    """

    seconds: float
    per_token: float = 0.0

    def at(self, kv_tokens: float) -> float:
        """Seconds with so many committed tokens in all requests together."""
        return self.seconds + self.per_token * kv_tokens


@dataclass(frozen=True)
class CostTable:
    """Costs by program and size; what lies between two sizes is interpolated, what lies outside is scaled.

    Attributes:
        plain: DECODE, by padded requests.
        verify: RAGGED_VERIFY and what follows it (DRAFT_EXTEND), by rows: the graphs' budget.
        drafting: what precedes it (DRAFT), by padded requests; empty for drafts that the host makes.
        catching_up: the head's forward over rows that plain rounds left behind, by requests; `per_token` is the seconds
            that each row adds. Empty for drafts that the host makes.

    Raises:
        RequestError: no sizes, or a cost that is no positive number of seconds.
    """

    plain: Mapping[int, Cost]
    verify: Mapping[int, Cost]
    drafting: Mapping[int, Cost] = field(default_factory=dict)
    catching_up: Mapping[int, Cost] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("plain", "verify", "drafting", "catching_up"):
            costs = getattr(self, name)
            check_kind(f"the cost table's {name}", costs, Mapping, "costs by size", "write {8: Cost(0.01)}")
        for name in ("plain", "verify"):
            if not getattr(self, name):
                raise RequestError(f"the cost table's {name} has 0 sizes, but at least 1 is needed; measure one")
        for name in ("plain", "verify", "drafting", "catching_up"):
            for size, cost in getattr(self, name).items():
                if not (is_count(size) and size > 0 and _is_cost(cost)):
                    raise RequestError(
                        f"the cost of {name}[{size!r}] is {cost!r}, but sizes are counts, seconds are positive and "
                        "finite, and nothing is paid back by KV; measure it again"
                    )

    def decode(self, padded: int, kv_tokens: float) -> float:
        """Seconds of a plain round."""
        return _at(self.plain, padded, kv_tokens)

    def speculate(self, budget: int, padded: int, kv_tokens: float) -> float:
        """Seconds of a round that drafts for `padded` requests and verifies `budget` rows."""
        drafting = _at(self.drafting, padded, kv_tokens) if self.drafting else 0.0
        return _at(self.verify, budget, kv_tokens) + drafting

    def catch_up(self, requests: int, rows: int) -> float:
        """Seconds until the head of so many requests has read `rows` rows that wait."""
        return _at(self.catching_up, requests, rows) if rows and self.catching_up else 0.0


def _is_cost(cost: object) -> bool:
    """Whether it is a `Cost` that time can have."""
    if not isinstance(cost, Cost) or not (is_number(cost.seconds) and is_number(cost.per_token)):
        return False
    return cost.seconds > 0 and cost.per_token >= 0


def _at(costs: Mapping[int, Cost], size: int, kv_tokens: float) -> float:
    """Between sizes a straight line; beyond the largest as many times its time as it has times its rows."""
    sizes = sorted(costs)
    above = bisect_left(sizes, size)
    if above == len(sizes):
        return costs[sizes[-1]].at(kv_tokens) * size / sizes[-1]
    high = costs[sizes[above]].at(kv_tokens)
    if sizes[above] == size or above == 0:
        return high
    low, share = costs[sizes[above - 1]].at(kv_tokens), (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    return low + (high - low) * share
