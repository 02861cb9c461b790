"""Prints the proofs of one backend as a text table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .prover import Proof, Status

RANGE = (
    "Proved for every batch and all C, P, k, S, D, limits and three capture sizes >= 1; "
    "overlap on and off; heads 8/2, head_dim 128, and 8 heads over latent rows of 576 with values of 512."
)
LEMMA = (
    "Sums over requests: a sum is at most R times its largest term, and the batch of R requests equal to the largest "
    "one is within the limits."
)


def proof_table(name: str, proofs: Sequence[Proof]) -> str:
    """Return the table's text: one line per theorem, the count of each status, and the range of the claims."""
    width = max((len(proof.theorem) for proof in proofs), default=0)
    lines, variant = [], ""
    for proof in proofs:
        if proof.variant != variant:
            variant = proof.variant
            lines.append(f"{name}: {variant}")
        note = f"\n      {proof.note}" if proof.note and proof.status is not Status.PROVED else ""
        lines.append(f"  {proof.status.value:<10} {proof.theorem:<{width}}  {proof.claim}{note}")
    counts = Counter(proof.status.value for proof in proofs)
    return "\n".join([*lines, ", ".join(f"{count} {status}" for status, count in counts.items()), RANGE, LEMMA])
