"""Proof of the suite's item about the buffers of attention layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark_contract.check import ContractViolation

from .prover import Status, prove_plan
from .theorems import VARIANTS, plan_of

if TYPE_CHECKING:
    from draftmark_contract.backend_under_test import BackendUnderTest


def assert_proved(subject: BackendUnderTest, index: int) -> None:
    """Prove that no batch of a variant of geometries needs more of a buffer than buffers() declares.

    Args:
        subject: the backend.
        index: place of the variant in `VARIANTS`, which is also the number of the item's case.

    Raises:
        ContractViolation: a theorem is refuted or undecided.
        Refused: the backend serves no geometry of the variant.
    """
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
