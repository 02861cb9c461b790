"""Adaptive drafting: each round decides whether to draft and how many rows to verify.

Modules in the order of a round:

* `survival`: probability that verification accepts a draft.
* `policy`, `forecast`, `costs`: choice of a row budget (rows that one forward verifies over all requests).
* `candidates`: admission of the likeliest drafts.
* `calibration`, `forecast`, `grounds`: updates from the tokens that the round accepted.

`speculation` contains the configuration. `head` (drafts of a model) and `host` (drafts on the host) run the rounds.
"""

from .costs import Cost, CostTable
from .speculation import Adaptive

__all__ = ["Adaptive", "Cost", "CostTable"]
