"""`draftmark prove NAME`: proves that a backend's buffer sizes suffice for every batch within its limits."""

from __future__ import annotations

import argparse

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
    """Prove that each buffer size suffices, and print one table row per proof."""
    from ..runner.prove import prove

    return prove(args.name)
