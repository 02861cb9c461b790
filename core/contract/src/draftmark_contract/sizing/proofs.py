"""Access to the distribution draftmark-proof, which the suite uses where it is installed."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..check import ContractViolation


def proof_of(what: str) -> ModuleType:
    """Return a module of `draftmark_proof` that has the function `assert_proved`: ``"buffers"`` or ``"state"``.

    Raises:
        ContractViolation: draftmark-proof or z3 is not installed.
    """
    try:
        return importlib.import_module(f"draftmark_proof.{what}")
    except ImportError as error:
        remedy = "pip install 'draftmark-contract[proof]'"
        raise ContractViolation("proofs need draftmark-proof", got=str(error), remedy=remedy) from error
