"""`draftmark prove NAME`: the sizing theorems of a backend and their status."""

from __future__ import annotations

import argparse

SUMMARY = "prove a backend's buffer sizes for every batch within the limits"
EXAMPLES = """\
examples:
  draftmark prove reference
  draftmark prove my_npu

Each line is one claim, "what a batch needs fits what buffers() declares, for
every batch within the limits", and whether it is proved, refuted (with a small
batch, replayed on plain integers) or undecided. Exit code 1 unless all are
proved."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", metavar="NAME", help="a backend; `draftmark list` shows them")


def run(args: argparse.Namespace) -> int:
    """Prove, and print the table."""
    from ..runner.run import prove

    return prove(args.name)
