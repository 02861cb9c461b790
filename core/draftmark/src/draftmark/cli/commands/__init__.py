"""The commands, found by entry point: each distribution brings its own.

A command is a module named in the entry-point group `GROUP`. It has four things: ``SUMMARY`` (a line for
``draftmark --help``), ``EXAMPLES`` (shown by its own ``--help``), ``configure(parser)``, which adds its arguments, and
``run(args)``, which returns an exit code or raises `DraftmarkError`. It imports torch inside `run` only, if at all.
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
from typing import Protocol, cast

from ...errors import DraftmarkError

GROUP = "draftmark.commands"
ORDER = ("list", "doctor", "size", "generate", "contract", "judge", "prove", "bench", "new-backend")
"""Of `draftmark --help`; commands of other distributions follow by name."""
PARTS = {
    "generate": "pip install 'draftmark-speculative[hf]'",
    "contract": "pip install 'draftmark-contract[torch]'",
    "judge": "pip install 'draftmark-contract[torch]'",
    "prove": "pip install 'draftmark-contract[proof]'",
    "bench": "pip install 'draftmark-contract[torch]'",
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


class Unusable:
    """Stands for a command whose module cannot be imported: listed in the help, and an error when it is run."""

    EXAMPLES = ""

    def __init__(self, entry: md.EntryPoint, error: Exception) -> None:
        self.SUMMARY = f"cannot be imported: {type(error).__name__}"
        self._entry, self._error = entry, error

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Take whatever arguments the command may have."""
        parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace) -> int:
        """Raise the error that importing the module raised."""
        owner = self._entry.dist.name if self._entry.dist else self._entry.value
        raise DraftmarkError(
            f"importing {self._entry.value} raised {type(self._error).__name__}: {self._error}; reinstall {owner}"
        ) from self._error


def installed() -> dict[str, md.EntryPoint]:
    """Every installed command by name, in the order of `draftmark --help`. Imports none of them."""
    found = {entry.name: entry for entry in md.entry_points(group=GROUP)}
    names = [name for name in ORDER if name in found] + sorted(set(found) - set(ORDER))
    return {name: found[name] for name in names}


def command(entry: md.EntryPoint) -> Command:
    """The module of one command."""
    return cast(Command, entry.load())
