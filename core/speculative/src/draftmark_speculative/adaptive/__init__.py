"""Adaptive drafting, in the order of a round: survival → choice of a budget (policy, forecast, costs) → admission →
what came of it (calibration, forecast). `speculation` is what a configuration names; `head` and `host` run it."""

from .costs import Cost, CostTable
from .speculation import Adaptive

__all__ = ["Adaptive", "Cost", "CostTable"]
