"""The command line. `main` is the console script; each command is a module of `draftmark.cli.commands`.

Nothing here imports torch before a command needs it: `list`, `size` and every `--help` work where torch does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from .errors import reported
from .parser import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 success, 2 wrong arguments, 130 interrupted, else 1.

    Args:
        argv: arguments without the program's name; None takes the process's own.
    """
    # A device's torch plugin is imported by name, behind the backend's own checks; where torch loads it by itself, one
    # that does not fit torch's build ends the process, or breaks `import torch`.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        command, args = parse(argv)
    except SystemExit as leaving:  # argparse has spoken: --help, --version, or a wrong argument
        return int(leaving.code or 0)
    return reported(command.run, args)
