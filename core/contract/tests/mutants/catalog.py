"""The list of all mutants, and the known bugs that cannot be imitated by a mutant here."""

from __future__ import annotations

from . import (
    arenas,
    attention_parts,
    batches,
    black_boxes,
    blind_histories,
    blind_invariance,
    blind_pools,
    blind_process,
    blind_sizes,
    boundaries,
    chosen,
    conditions,
    declarations,
    drafted_rows,
    drafters,
    forks,
    invariance,
    kernels,
    late,
    latent,
    limits_and_logits,
    lives,
    museum,
    places,
    plans,
    pools,
    processes,
    production_sizes,
    rare_sizes,
    recurrent,
    scales_and_strides,
    sinks,
    sizes,
    state_and_order,
    timing,
    trees,
    windows,
)
from .mutant import Mutant, install_standalone

MODULES = (
    *(sizes, batches, arenas, plans, kernels, rare_sizes, declarations, timing, boundaries),
    *(trees, conditions, late, museum, sinks, places, windows, processes, invariance, black_boxes),
    *(pools, forks, drafters, drafted_rows, lives, production_sizes, latent, chosen, recurrent),
    *(limits_and_logits, attention_parts, state_and_order, scales_and_strides),
    *(blind_histories, blind_invariance, blind_pools, blind_process, blind_sizes),
)
MUTANTS: tuple[Mutant, ...] = tuple(
    sorted((one for module in MODULES for one in module.MUTANTS), key=lambda one: (one.id[0], one.id[1:3], one.id))
)
install_standalone(MUTANTS)
KILLER = (
    limits_and_logits.KILLER
    | attention_parts.KILLER
    | state_and_order.KILLER
    | scales_and_strides.KILLER
    | sinks.KILLER
    | places.KILLER
    | windows.KILLER
    | processes.KILLER
    | invariance.KILLER
    | black_boxes.KILLER
    | pools.KILLER
    | forks.KILLER
    | drafters.KILLER
    | drafted_rows.KILLER
    | lives.KILLER
    | production_sizes.KILLER
    | latent.KILLER
    | chosen.KILLER
    | recurrent.KILLER
    | blind_histories.KILLER
    | blind_invariance.KILLER
    | blind_pools.KILLER
    | blind_process.KILLER
    | blind_sizes.KILLER
)
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


def pairs() -> list[tuple[Mutant, str]]:
    """Return every mutant with each layout that it supports."""
    return [(one, layout) for one in MUTANTS for layout in one.layouts]
