"""The commands, found by entry point: each distribution brings its own.

A command is a module named in the entry-point group `GROUP`. It has four things: ``SUMMARY`` (a line for
``draftmark --help``), ``EXAMPLES`` (shown by its own ``--help``), ``configure(parser)``, which adds its arguments, and
``run(args)``, which returns an exit code or raises `DraftmarkError`. It imports torch inside `run` only, if at all.
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
from typing import Protocol, cast

GROUP = "draftmark.commands"
ORDER = ("list", "doctor", "size", "generate", "contract", "prove", "bench", "new-backend")
"""Of `draftmark --help`; commands of other distributions follow by name."""
PARTS = {
    "generate": "pip install 'draftmark-speculative[hf]'",
    "contract": "pip install 'draftmark-contract[torch]'",
    "prove": "pip install 'draftmark-contract[proof]'",
}
"""Commands of draftmark's own distributions that may be absent, and what brings them."""


class Command(Protocol):
    """What a command module looks like."""

    SUMMARY: str
    EXAMPLES: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit code."""


def installed() -> dict[str, md.EntryPoint]:
    """Every installed command by name, in the order of `draftmark --help`. Imports none of them."""
    found = {entry.name: entry for entry in md.entry_points(group=GROUP)}
    names = [name for name in ORDER if name in found] + sorted(set(found) - set(ORDER))
    return {name: found[name] for name in names}


def command(entry: md.EntryPoint) -> Command:
    """The module of one command."""
    return cast(Command, entry.load())
