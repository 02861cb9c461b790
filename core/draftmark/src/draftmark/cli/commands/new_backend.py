"""`draftmark new-backend NAME`: a vendor's package that conforms, to put kernels in one method at a time."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import SUCCESS, ArgumentError

SUMMARY = "write a vendor's package: plain torch that conforms, to put kernels in"
EXAMPLES = """\
examples:
  draftmark new-backend my_npu
  draftmark new-backend my_npu --folder plugins

The package it writes installs, loads and conforms: plain torch, right
everywhere and slow. Put your kernels in one method at a time;
`draftmark contract my_npu` says what they get wrong."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("name", metavar="NAME", help="the backend's name, a Python identifier")
    parser.add_argument("--folder", default=".", help="where to write draftmark-NAME; default: here")


def run(args: argparse.Namespace) -> int:
    """Write it."""
    from ...skeleton import write_skeleton

    try:
        root = write_skeleton(args.name, Path(args.folder))
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    print(f"wrote {root}\nnext: pip install -e '{root}[test]', then draftmark contract {args.name} --sample 3")
    return SUCCESS
