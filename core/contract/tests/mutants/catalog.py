"""The list of all mutants, and the known bugs that cannot be imitated by a mutant here.

A mutant is filed in `rules` under the check that killed it first, in a package where one file would be too long.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from importlib import import_module

from . import rules
from .mutant import Mutant, install_standalone

FOUND = pkgutil.walk_packages(rules.__path__, f"{rules.__name__}.")
MODULES = [import_module(one.name) for one in FOUND if not one.ispkg]
MUTANTS: tuple[Mutant, ...] = tuple(
    sorted((one for module in MODULES for one in module.MUTANTS), key=lambda one: (one.id[0], one.id[1:3], one.id))
)
install_standalone(MUTANTS)
KILLER: dict[str, str] = {name: check for one in MODULES for name, check in getattr(one, "KILLER", {}).items()}
"""Check that must kill a mutant, by mutant id. Covers mutants of outside authors, of sinks and of batch invariance."""
SURVIVORS: dict[str, str] = {}
"""Mutants that no check is known to kill, each with the gap of the suite. A new check removes its entry."""
INAPPLICABLE = {
    "M32": "Plans cross-attention with the decoder's lengths. The contract has no cross-attention: a backend "
    "receives one length per request",
}

GUARDS = {
    "load.imports_lightly": "imports an installed plugin in a new process, but a mutant is only an object; "
    "core/contract/tests/test_frame_pytest.py installs bad plugins",
    "load.known_failures_are_current": "reads the contract.toml of an installed plugin; tested in "
    "core/contract/tests/test_frame_pytest.py",
}
"""Checks that cannot kill any mutant, and how they are tested instead."""


def named(names: Iterable[str]) -> list[Mutant]:
    """Return the mutants with these ids."""
    wanted = set(names)
    return [one for one in MUTANTS if one.id in wanted]


def pairs() -> list[tuple[Mutant, str]]:
    """Return every mutant with each layout that it supports."""
    return [(one, layout) for one in MUTANTS for layout in one.layouts]
