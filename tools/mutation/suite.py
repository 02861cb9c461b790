"""The contract suite for this generator: items, and the outcome of one item on a loaded backend."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch

from draftmark.loaded import LoadedBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier
from draftmark_contract.runner.item import Item, all_items, run_item
from draftmark_contract.runner.outcome import Outcome

TIERS = (Tier.SIZING, Tier.HOST)
FAILED = Outcome.FAILED.value


@dataclass(frozen=True)
class Verdict:
    """Outcome of one item, with marks such as "interpreted", and its message."""

    outcome: str
    message: str

    @property
    def failed(self) -> bool:
        """True if the item fails a run of `draftmark contract`."""
        return self.outcome.startswith(FAILED)


@cache
def items() -> dict[str, Item]:
    """Return every item of the sizing and host tiers, by id."""
    return {one.id: one for one in all_items(TIERS)}


def verdict(backend: LoadedBackend, item: str) -> Verdict:
    """Run one item as `draftmark contract` does."""
    one = items()[item]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = run_item(one, BackendUnderTest(backend, "cpu", one.tier), [])
    return Verdict(", ".join((result.outcome.value, *result.marks)), result.message)
