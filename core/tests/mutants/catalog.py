"""All mutants, and the known bugs that no mutant can imitate here."""

from __future__ import annotations

from . import arenas, batches, kernels, plans, sizes
from .mutant import Mutant

MUTANTS: tuple[Mutant, ...] = tuple(
    sorted(
        (*sizes.MUTANTS, *batches.MUTANTS, *arenas.MUTANTS, *plans.MUTANTS, *kernels.MUTANTS),
        key=lambda one: (one.id[0], one.id[1:3], one.id),
    )
)
INAPPLICABLE = {
    "M32": "cross-attention planned with the decoder's lengths: the contract has no cross-attention, so a backend is "
    "given one length per request and cannot take the other",
}


def pairs() -> list[tuple[Mutant, str]]:
    """Every mutant in every layout that it can be made in."""
    return [(one, layout) for one in MUTANTS for layout in one.layouts]
