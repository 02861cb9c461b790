"""What is asked of any backend that can be driven, made from the contract's own cases.

Each module has ``questions(bench)``, which makes items and opens nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from ..driver import Bench
from ..item import Item
from . import graphs, histories, inputs, numerics, production, rows_of_nobody

MODULES: tuple[ModuleType, ...] = (numerics, rows_of_nobody, inputs, histories, graphs, production)
"""In the order of learning."""


def questions(bench: Bench) -> Sequence[Item]:
    """All of them."""
    found: list[Item] = []
    for module in MODULES:
        found += module.questions(bench)
    return found
