"""Builds the items for any backend with a `Driver`: cases of the contract's checks, on a layer of an engine.

Each module has a function ``questions(caps)`` that builds items. Building opens no backend.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from ...runner.item import Item
from ..driver import EngineCapabilities
from . import graphs, histories, production, steps

MODULES: tuple[ModuleType, ...] = (steps, histories, graphs, production)
"""Modules in the order in which a new backend should pass them."""


def questions(caps: EngineCapabilities) -> Sequence[Item]:
    """Return the items that all modules of this package build."""
    found: list[Item] = []
    for module in MODULES:
        found += module.questions(caps)
    return found
