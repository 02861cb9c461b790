"""Whether a buffer that a release sizes by itself has room for what a batch needs."""

from __future__ import annotations

from draftmark_contract.check import ContractViolation


def check_room(
    what: str, unit: str, have: int, need: int, *, batch: str, formula: str, bug: str, each: str = ""
) -> None:
    """Compare the room of a buffer with a need that follows from the batch.

    Args:
        each: what has that room, where the buffer has several, e.g. `` a row``.

    Raises:
        ContractViolation: `what` has fewer `unit` than are needed.
    """
    if need > have:
        raise ContractViolation(
            f"{what} is short by {need - have} {unit}",
            batch=batch,
            got=f"{have} {unit}{each}",
            expected=f"{need}",
            formula=formula,
            bug=bug,
        )
