"""The policy finds out when drafts begin or cease to pay: simulated rounds of given costs and acceptance."""

from __future__ import annotations

import random
from functools import partial
from statistics import fmean, median

import pytest

from draftmark_speculative.adaptive.costs import Cost, CostTable
from draftmark_speculative.adaptive.forecast import Forecast, grid
from draftmark_speculative.adaptive.policy import UPKEEP_SHARE, Load, Policy

STEPS, ROOM, SHARE = 4, 512, 0.005
"""Drafts of a chain, rows of a request's backlog, default probe_share."""
GOOD, BAD, NONE = (0.6, 0.65, 0.7, 0.75), (0.2, 0.2, 0.2, 0.2), (0.0, 0.0, 0.0, 0.0)
"""Probability that a draft is accepted at each depth if its parent is. The simulated head always claims `GOOD`."""
TABLES = {
    1: CostTable({1: Cost(4.57e-3)}, {5: Cost(6.22e-3)}, {1: Cost(1.29e-3)}, {1: Cost(3.4e-3, 1e-6)}),
    4: CostTable({4: Cost(5.54e-3)}, {20: Cost(6.52e-3)}, {4: Cost(1.22e-3)}, {4: Cost(2.2e-3, 1e-6)}),
    64: CostTable({64: Cost(7.6e-3)}, {320: Cost(1.28e-2)}, {64: Cost(1.9e-3)}, {64: Cost(5e-3, 1e-6)}),
}
"""Costs of an 8B model on an H200, by requests; one row budget each."""


class Rounds:
    """Decodes with the policy, in simulated seconds: each draft is accepted by a coin toss."""

    def __init__(self, requests, seed):
        self.table, self.requests, self.toss = TABLES[requests], requests, random.Random(seed).random
        self.budget = max(self.table.verify)
        self.load, self.policy = Load(requests, requests, 0), Policy(self.table, (self.budget,), SHARE)
        self.forecast, self.waiting, self.rested = Forecast(grid(STEPS + 1)), 0, 0
        alive = [1.0]
        for chance in GOOD:
            alive.append(alive[-1] * chance)
        self.claimed = [sum(alive[: int(p)]) + (p % 1) * ([*alive, 0.0][int(p)]) for p in self.forecast.points]

    def decode(self, accepted, rounds):
        """Run rounds at this acceptance; return (speed divided by plain decoding's, share of plain rounds)."""
        seconds, tokens, plain = 0.0, 0, 0
        for _ in range(rounds):
            tokens_of = partial(self.forecast.tokens, requests=self.requests)
            waiting = self.waiting * self.requests
            if not self.forecast.known:
                budget = self.policy.start(self.load)
            else:
                budget = self.policy.decide(self.load, tokens_of, waiting)
            if budget is None:
                seconds += self.table.decode(self.requests, 0)
                tokens, plain, self.rested = tokens + self.requests, plain + 1, self.rested + 1
                if self.waiting == ROOM - 1:
                    assert self.policy.keeps_up(self.load, waiting)
                    seconds, self.waiting = seconds + self.table.catch_up(self.requests, waiting), 0
                self.waiting += 1
                continue
            seconds += self.table.catch_up(self.requests, waiting) + self.table.speculate(budget, self.requests, 0)
            self.forecast.age(self.rested)
            self.waiting = self.rested = 0
            came = sum(1 + self.kept(accepted) for _ in range(self.requests))
            self.forecast.learn(self.claimed, budget, self.requests, came)
            tokens += came
        return tokens / seconds * self.table.decode(self.requests, 0) / self.requests, plain / rounds

    def kept(self, accepted):
        """Return the number of accepted drafts of one chain."""
        return next((depth for depth, chance in enumerate(accepted) if self.toss() >= chance), STEPS)


def speeds(requests, seeds, *phases):
    """Return, for each phase (acceptance, rounds), the speeds of all seeds and their shares of plain rounds."""
    found = []
    for seed in range(seeds):
        engine = Rounds(requests, seed)
        found.append([engine.decode(accepted, rounds) for accepted, rounds in phases])
    return [tuple(zip(*phase, strict=True)) for phase in zip(*found, strict=True)]


@pytest.mark.parametrize("requests", TABLES)
def test_good_drafts_are_kept_from_the_start(requests):
    """No run of a good head decodes mostly plainly, although single requests have unlucky first rounds."""
    [(fast, plain)] = speeds(requests, 40 if requests == 1 else 8, (GOOD, 200))
    assert fmean(plain) < 0.05 and max(plain) < 0.5
    assert fmean(fast) > {1: 1.38, 4: 1.6, 64: 1.1}[requests]


@pytest.mark.parametrize("requests", TABLES)
def test_drafts_that_pay_again_are_found(requests):
    """After 600 rounds of bad drafts, half of the runs find good ones within 150 rounds, all within 1,000."""
    phases = (BAD, 600), (GOOD, 150), (GOOD, 850), (GOOD, 200)
    _, (_, soon), (_, later), (_, late) = speeds(requests, 24 if requests == 1 else 6, *phases)
    assert median(soon) < 0.95
    assert max(later) < 0.9
    assert fmean(late) < 0.12


@pytest.mark.parametrize("accepted", [BAD, NONE])
@pytest.mark.parametrize("requests", TABLES)
def test_drafts_that_cease_to_pay_are_dropped(requests, accepted):
    """After good drafts, worthless ones stop within 80 rounds; then only probes and upkeep cost time."""
    _, (_, early), (slow, plain) = speeds(requests, 8, (GOOD, 200), (accepted, 80), (accepted, 2000))
    assert fmean(early) > 0.4
    assert min(plain) > 0.95
    assert min(slow) > 1 / (1 + SHARE + UPKEEP_SHARE) - 0.003


def test_a_policy_that_starts_at_plain_decoding_finds_drafts():
    """A forecast that saw only rejected drafts starts with plain rounds, and drafts once they are accepted."""
    _, (_, plain) = speeds(1, 24, (NONE, 300), (GOOD, 1000))
    assert max(plain) < 0.6
