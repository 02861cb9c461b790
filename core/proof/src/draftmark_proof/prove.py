"""`draftmark prove NAME`: proves that a backend's buffer sizes suffice for every batch within its limits."""

from __future__ import annotations

import argparse
import time

SUMMARY = "prove a backend's buffer sizes for every batch within the limits"
EXAMPLES = """\
examples:
  draftmark prove reference
  draftmark prove my_npu

Each line is one claim: the size that a batch needs is at most the size that
buffers() declares, for every batch within the limits. The claim is proved,
refuted (with a small batch as counterexample, checked on plain integers) or
undecided. Exit code 1 unless all claims are proved."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", help="backend to prove; `draftmark list` shows all")


def run(args: argparse.Namespace) -> int:
    """Print each theorem and its status; return 1 if one is refuted or undecided."""
    from draftmark.registry import load
    from draftmark_contract.backend_under_test import BackendUnderTest
    from draftmark_contract.check import Tier

    from .prover import prove_all
    from .table import proof_table

    start = time.monotonic()
    proofs = prove_all(BackendUnderTest(load(args.name), "cpu", Tier.SIZING))
    print(proof_table(args.name, proofs))
    print(f"{time.monotonic() - start:.1f} s")
    return int(any(proof.fails for proof in proofs))
