"""The command line. `main` is the console script; each command is a module of `draftmark.cli.commands`.

Nothing here imports torch before a command needs it: `list`, `size` and every `--help` work where torch does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from .errors import reported
from .parser import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 success, 2 wrong arguments, 130 interrupted, else 1.

    Args:
        argv: arguments without the program's name; None takes the process's own.
    """
    try:
        command, args = parse(argv)
    except SystemExit as leaving:  # argparse has spoken: --help, --version, or a wrong argument
        return int(leaving.code or 0)
    return reported(command.run, args)
