"""Commands of the command line, found by entry point: each distribution adds its own.

A command is a module in the entry-point group `GROUP`, with four attributes. ``SUMMARY`` is its line in
``draftmark --help``, ``EXAMPLES`` is the end of its own ``--help``. ``configure(parser)`` adds its arguments, and
``run(args)`` returns an exit code or raises `DraftmarkError`. Only `run` may import torch.
"""

from __future__ import annotations

import argparse
import importlib.metadata as md
from typing import Protocol, cast

from draftmark.errors import DraftmarkError

GROUP = "draftmark.commands"
ORDER = ("list", "doctor", "size", "explain", "warm", "generate", "contract", "judge", "prove", "bench", "new-backend")
"""Order of commands in `draftmark --help`; commands of other distributions follow, sorted by name."""
PARTS = {
    "generate": "pip install 'draftmark-speculative[hf]'",
    "contract": "pip install 'draftmark-contract[torch]'",
    "judge": "pip install 'draftmark-contract[torch]'",
    "prove": "pip install draftmark-proof",
    "bench": "pip install 'draftmark-contract[torch]'",
    "new-backend": "pip install draftmark-contract",
}
"""Commands of draftmark's own distributions that may be absent, with the pip command that installs each."""


class Command(Protocol):
    """Interface of a command module."""

    SUMMARY: str
    EXAMPLES: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to `parser`."""

    def run(self, args: argparse.Namespace) -> int:
        """Run the command and return the exit code."""


class Unusable:
    """Placeholder for a command with a module that cannot be imported: appears in the help and raises when run."""

    EXAMPLES = ""

    def __init__(self, entry: md.EntryPoint, error: Exception) -> None:
        self.SUMMARY = f"cannot be imported: {type(error).__name__}"
        self._entry, self._error = entry, error

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Accept any arguments."""
        parser.add_argument("arguments", nargs="*", help=argparse.SUPPRESS)

    def run(self, args: argparse.Namespace) -> int:
        """Raise an error with the cause of the failed import."""
        owner = self._entry.dist.name if self._entry.dist else self._entry.value
        raise DraftmarkError(
            f"importing {self._entry.value} raised {type(self._error).__name__}: {self._error}; reinstall {owner}"
        ) from self._error


def installed() -> dict[str, md.EntryPoint]:
    """Return every installed command by name, in the order of `draftmark --help`. Imports none of them."""
    found = {entry.name: entry for entry in md.entry_points(group=GROUP)}
    names = [name for name in ORDER if name in found] + sorted(set(found) - set(ORDER))
    return {name: found[name] for name in names}


def command(entry: md.EntryPoint) -> Command:
    """Import and return the module of one command."""
    return cast(Command, entry.load())
