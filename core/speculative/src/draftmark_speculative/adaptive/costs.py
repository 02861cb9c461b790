"""Cost of a round: seconds of each captured program by size and KV tokens read. Numbers only, no torch."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field

from draftmark import RequestError

from ..arguments import check_kind, is_count, is_number


@dataclass(frozen=True)
class Cost:
    """Seconds of one program: a fixed part, and a part for each KV token of its requests.

    Attributes:
        seconds: seconds with empty prefixes.
        per_token: additional seconds for each committed token, summed over the requests.
    """

    seconds: float
    per_token: float = 0.0

    def at(self, kv_tokens: float) -> float:
        """Return the program's seconds if all requests together have `kv_tokens` committed tokens."""
        return self.seconds + self.per_token * kv_tokens


@dataclass(frozen=True)
class CostTable:
    """Holds the seconds of each program of a round, by size (padded requests or row budget).

    Costs between two sizes are interpolated. Above the largest size they grow in proportion to the size. Below the
    smallest size the cost of the smallest size applies.

    Attributes:
        plain: cost of DECODE, by padded requests.
        verify: cost of RAGGED_VERIFY with the following DRAFT_EXTEND, by row budget.
        drafting: cost of DRAFT, by padded requests; empty for drafts made on the host.
        catching_up: cost of the head's forward over rows of plain rounds, by requests; `per_token` is the seconds that
            each row adds. Empty for drafts that are made on the host.

    Raises:
        RequestError: a program has no sizes, or a cost is not a positive number of seconds.
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
                        f"the cost of {name}[{size!r}] is {cost!r}, but sizes must be counts, seconds must be positive "
                        "and finite, and per_token must be at least 0; measure it again"
                    )

    def decode(self, padded: int, kv_tokens: float) -> float:
        """Return the seconds of a round without drafts."""
        return _at(self.plain, padded, kv_tokens)

    def speculate(self, budget: int, padded: int, kv_tokens: float) -> float:
        """Return the seconds of a round that drafts for `padded` requests and verifies `budget` rows."""
        drafting = _at(self.drafting, padded, kv_tokens) if self.drafting else 0.0
        return _at(self.verify, budget, kv_tokens) + drafting

    def catch_up(self, requests: int, rows: int) -> float:
        """Return the seconds that the head needs to process `rows` waiting rows of `requests` requests."""
        return _at(self.catching_up, requests, rows) if rows and self.catching_up else 0.0


def _is_cost(cost: object) -> bool:
    """Return True if `cost` is a `Cost` with positive, finite seconds."""
    if not isinstance(cost, Cost) or not (is_number(cost.seconds) and is_number(cost.per_token)):
        return False
    return cost.seconds > 0 and cost.per_token >= 0


def _at(costs: Mapping[int, Cost], size: int, kv_tokens: float) -> float:
    """Return the cost at `size`: linear between sizes, proportional to the size beyond the largest."""
    sizes = sorted(costs)
    above = bisect_left(sizes, size)
    if above == len(sizes):
        return costs[sizes[-1]].at(kv_tokens) * size / sizes[-1]
    high = costs[sizes[above]].at(kv_tokens)
    if sizes[above] == size or above == 0:
        return high
    low, share = costs[sizes[above - 1]].at(kv_tokens), (size - sizes[above - 1]) / (sizes[above] - sizes[above - 1])
    return low + (high - low) * share
