"""What is asked of any backend that can be driven, made from the contract's own cases.

Each module has ``questions(caps)``, which makes items and opens nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from ..driver import EngineCapabilities
from ..item import Item
from . import graphs, histories, inputs, numerics, padding_rows, production

MODULES: tuple[ModuleType, ...] = (numerics, padding_rows, inputs, histories, graphs, production)
"""In the order of learning."""


def questions(caps: EngineCapabilities) -> Sequence[Item]:
    """All of them."""
    found: list[Item] = []
    for module in MODULES:
        found += module.questions(caps)
    return found
