"""Checks by proof that buffers cover every batch of every geometry, not only the cases that other checks run."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

from ..check import SIZES, Case, ContractViolation, Tier, check
from ..sizing.geometries import PROVED, standing_for

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


@check(tier=Tier.SIZING, needs=SIZES, cases=_cases, bugs=("sglang#27338", "sglang#22778", "sglang#29450"))
def needed_is_declared(subject: BackendUnderTest, index: int) -> None:
    """z3 proves that no batch of any geometry needs more of a buffer than buffers() declares.

    The proof runs the plugin's own buffers() on symbolic integers.
    """
    if importlib.util.find_spec("z3") is None:
        raise ContractViolation("proofs need z3", got="no module z3", remedy="pip install 'draftmark-contract[proof]'")
    from ..proof.prover import Status, prove_plan
    from ..proof.theorems import VARIANTS, plan_of

    proofs = prove_plan(subject, plan_of(subject, VARIANTS[index]))
    failed = [proof for proof in proofs if proof.fails]
    if failed:
        first = failed[0]
        raise ContractViolation(
            f"{first.theorem}: {first.status.value} ({first.variant})",
            batch=first.note,
            expected=first.claim,
            got=", ".join(f"{proof.theorem} {proof.status.value}" for proof in failed[1:]) or None,
            formula="draftmark_contract.sizing.required_sizes against the plugin's buffers()",
            bug="sglang#27338, sglang#22778" if first.status is Status.REFUTED else "",
            remedy="take the extent from Geometry, and combine with ceil_div, maximum and minimum",
        )
    if all(proof.status is Status.REFUSED for proof in proofs):
        raise subject.refusal([proof.note for proof in proofs])
