"""All mutants, and the known bugs that no mutant can imitate here."""

from __future__ import annotations

from . import (
    answers,
    arenas,
    attention_strangers,
    batches,
    conditions,
    corners,
    edges,
    kernels,
    late,
    moments,
    museum,
    order_strangers,
    plans,
    sinks,
    sizes,
    strangers,
    third_strangers,
    trees,
)
from .mutant import Mutant

MODULES = (
    *(sizes, batches, arenas, plans, kernels, corners, answers, moments, edges, trees, conditions, late, museum, sinks),
    *(strangers, attention_strangers, order_strangers, third_strangers),
)
MUTANTS: tuple[Mutant, ...] = tuple(
    sorted((one for module in MODULES for one in module.MUTANTS), key=lambda one: (one.id[0], one.id[1:3], one.id))
)
KILLER = strangers.KILLER | attention_strangers.KILLER | order_strangers.KILLER | third_strangers.KILLER | sinks.KILLER
"""Of strangers' mutants and those of sinks, the check of each one's class."""
INAPPLICABLE = {
    "M32": "cross-attention planned with the decoder's lengths: the contract has no cross-attention, so a backend is "
    "given one length per request and cannot take the other",
}

GUARDS = {
    "load.imports_lightly": "asks an installed plugin in a process of its own, which no mutant of an object has; "
    "core/contract/tests/test_frame_pytest.py installs bad plugins",
    "load.known_failures_are_current": "reads the contract.toml of an installed plugin; tested in "
    "core/contract/tests/test_frame_pytest.py",
}
"""Checks that no mutant can need, and why they are there."""


def pairs() -> list[tuple[Mutant, str]]:
    """Every mutant in every layout that it can be made in."""
    return [(one, layout) for one in MUTANTS for layout in one.layouts]
