"""Proves a backend's sizing for the command `draftmark prove`."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable

from draftmark.errors import DraftmarkError
from draftmark.registry import load

from ..check import Tier

Say = Callable[[str], None]


def prove(name: str, say: Say = print) -> int:
    """Prove that the buffer sizes of one backend suffice. Print each theorem and its status.

    Args:
        name: name of the backend.
        say: prints a line.

    Returns:
        0 if no theorem is refuted or undecided, else 1.

    Raises:
        DraftmarkError: z3 is not installed, or the backend does not load.
    """
    if importlib.util.find_spec("z3") is None:
        raise DraftmarkError("proofs need z3-solver, which is not installed; pip install 'draftmark-contract[proof]'")
    from ..backend_under_test import BackendUnderTest
    from ..proof.prover import prove_all
    from ..proof.table import proof_table

    start = time.monotonic()
    proofs = prove_all(BackendUnderTest(load(name), "cpu", Tier.SIZING))
    say(proof_table(name, proofs))
    say(f"{time.monotonic() - start:.1f} s")
    return int(any(proof.fails for proof in proofs))
