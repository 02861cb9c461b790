"""The command line. `main` is the console script; each command is a module of `draftmark_tools.cli.commands`.

torch is imported only by commands that need it: `list`, `size` and every `--help` work without torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from .errors import reported
from .parser import parse


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 success, 2 wrong arguments, 130 interrupted, 1 other errors.

    `contract` and `judge` exit with 2 for these errors, because 1 is a verdict there.

    Args:
        argv: arguments without the program's name; None means ``sys.argv[1:]``.
    """
    # The torch plugin of a device is imported by name, after the backend's own checks. With autoload, a plugin that
    # does not fit torch's build would end the process or break `import torch`.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        command, args = parse(argv)
    except SystemExit as leaving:  # argparse has printed --help, --version or an error
        return int(leaving.code or 0)
    return reported(command.run, args)
