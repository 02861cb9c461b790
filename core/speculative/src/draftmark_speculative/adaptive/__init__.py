"""Adaptive drafting: each round, decide whether to draft and how many rows to verify.

Modules in the order of a round:

* `survival`: probability that a draft is accepted.
* `policy`, `forecast`, `costs`: choice of a row budget.
* `candidates`: admission of the likeliest drafts.
* `calibration`, `forecast`, `grounds`: learning from the result.

`speculation` holds the configuration. `head` and `host` run it.
"""

from .costs import Cost, CostTable
from .speculation import Adaptive

__all__ = ["Adaptive", "Cost", "CostTable"]
