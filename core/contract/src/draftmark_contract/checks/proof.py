"""Checks by proof that buffers cover every batch of every geometry, not only the cases that other checks run."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from ..check import PROOFS, Case, Tier, check
from ..sizing.geometries import PROVED, standing_for
from ..sizing.proofs import proof_of

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest


def _cases() -> Sequence[Case]:
    kinds = product((False, True), PROVED.items(), (False, True))
    return [
        Case(
            f"{name}{'-latent' * latent}{'-overlap' * overlap}",
            index,
            (1, 5) if latent else (1, 0),
            geometry=standing_for(modes, overlap, latent),
        )
        for index, (latent, (name, modes), overlap) in enumerate(kinds)
    ]


@check(tier=Tier.SIZING, needs=PROOFS, cases=_cases, bugs=("sglang#27338", "sglang#22778", "sglang#29450"))
def needed_is_declared(subject: BackendUnderTest, index: int) -> None:
    """z3 proves that no batch of any geometry needs more of a buffer than buffers() declares.

    The proof runs the plugin's own buffers() on symbolic integers.
    """
    proof_of("buffers").assert_proved(subject, index)
