"""The commands. A new one is a module here and a line in `COMMANDS`.

A command module has three things: ``EXAMPLES`` (shown by ``--help``), ``configure(parser)``, which adds its
arguments, and ``run(args)``, which returns an exit code or raises `DraftmarkError`. It imports torch inside `run`
only, if at all.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

COMMANDS = {
    "list": "backends found, from metadata only",
    "doctor": "load each backend in a process of its own: versions, device, reasons",
    "size": "every buffer of a backend: formula, shape, bytes; no device, no torch",
    "generate": "decode prompts speculatively on a backend, and check the text",
    "contract": "judge a backend: every check, one verdict",
    "prove": "prove a backend's buffer sizes for every batch within the limits",
    "bench": "time the attention kernels of backends side by side on the device at hand",
    "new-backend": "write a vendor package's skeleton",
}
"""Every command and its summary, in the order of `draftmark --help`."""


class Command(Protocol):
    """What a command module looks like."""

    EXAMPLES: str

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Do it; returns the exit code."""


def command(name: str) -> Command:
    """The module of one command."""
    return cast(Command, importlib.import_module(f".{name.replace('-', '_')}", __name__))
