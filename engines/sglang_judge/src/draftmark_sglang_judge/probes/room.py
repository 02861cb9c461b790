"""Check that a buffer is as large as a batch needs."""

from __future__ import annotations

from draftmark_contract.check import ContractViolation


def check_room(
    what: str, unit: str, have: int, need: int, *, batch: str, formula: str, bug: str, each: str = ""
) -> None:
    """Raise an error if a buffer is smaller than a batch needs.

    Args:
        what: name of the buffer.
        unit: unit of `have` and `need`, in the plural.
        batch, formula, bug: details of the error.
        each: part of the buffer that has this size, e.g. `` a row``; "" for the whole buffer.

    Raises:
        ContractViolation: `have` is less than `need`.
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
