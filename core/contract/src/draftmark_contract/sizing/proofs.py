"""Access to the distribution draftmark-proof, which the suite uses where it is installed."""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from types import ModuleType

_PACKAGES = ("draftmark_proof", "z3")


@cache
def lack_of_proofs() -> str:
    """Return which package proofs lack on this machine, with the remedy; "" if they can run."""
    lacking = next((name for name in _PACKAGES if find_spec(name) is None), "")
    return f"proofs need {lacking}, which is not installed: pip install 'draftmark-contract[proof]'" if lacking else ""


def proof_of(what: str) -> ModuleType:
    """Return a module of `draftmark_proof` that has the function `assert_proved`: ``"buffers"`` or ``"state"``."""
    return importlib.import_module(f"draftmark_proof.{what}")
