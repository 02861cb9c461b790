"""The command `draftmark new-backend NAME`: writes a backend package in plain torch that passes the contract."""

from __future__ import annotations

import argparse
from pathlib import Path

from draftmark_tools.cli.errors import SUCCESS, ArgumentError

SUMMARY = "write a backend package in plain torch that passes the contract"
EXAMPLES = """\
examples:
  draftmark new-backend my_npu
  draftmark new-backend my_npu --folder plugins

The package installs, loads and passes the contract. Its plain torch is
correct on any device, and slow. Replace one method at a time with your
kernels; `draftmark contract my_npu` finds their errors."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("name", metavar="NAME", help="name of the backend, a Python identifier")
    parser.add_argument("--folder", default=".", help="folder for draftmark-NAME; default: the current one")


def run(args: argparse.Namespace) -> int:
    """Write the package and print the next commands."""
    from ..skeleton import write_skeleton

    try:
        root = write_skeleton(args.name, Path(args.folder))
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    print(f"wrote {root}\nnext: pip install -e '{root}[test]', then draftmark contract {args.name} --sample 3")
    return SUCCESS
