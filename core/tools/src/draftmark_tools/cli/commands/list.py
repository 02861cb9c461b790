"""The command `draftmark list`: prints the installed backends. Reads metadata and imports no plugin."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from draftmark.version import CONTRACT_MAJOR

from ..errors import SUCCESS
from ..rendering import Column, show, show_json, show_table

if TYPE_CHECKING:
    from draftmark.registry import Available

SCHEMA = 1
SUMMARY = "list installed backends, from metadata only"
EXAMPLES = """\
examples:
  draftmark list
  draftmark list --json"""

COLUMNS = (
    Column("backend", style="bold"),
    Column("package"),
    Column("version"),
    Column("contract"),
    Column("module", style="dim", wrap=True),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to `parser`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the installed backends."""
    from draftmark.registry import available

    found = available()
    owners = Counter(row.name for row in found if row.contract_major == CONTRACT_MAJOR)
    notes = [_note(row, owners[row.name]) for row in found]
    if args.json:
        backends = [vars(row) | {"note": note} for row, note in zip(found, notes, strict=True)]
        show_json({"schema": SCHEMA, "backends": backends})
        return SUCCESS
    rows = [(row.name, row.distribution, row.version, f"v{row.contract_major}", row.module) for row in found]
    show_table(COLUMNS, rows)
    for row, note in zip(found, notes, strict=True):
        if note:
            show(f"{row.name} of {row.distribution}: {note}", "yellow")
    show(f"{len(found)} found in installed metadata, none imported. `draftmark doctor` tests them.", "dim")
    return SUCCESS


def _note(row: Available, owners: int) -> str:
    if row.contract_major != CONTRACT_MAJOR:
        return f"this core supports contract v{CONTRACT_MAJOR}; install a release of {row.distribution} for it"
    if owners > 1:
        return f"{owners} distributions register this name; uninstall all but one with pip"
    return ""
