"""Processes, command lines and terminals of tests."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Process:
    """Result of a finished Python subprocess."""

    returncode: int
    out: str
    err: str


def run_python(code: str, *first_on_path: Path, **env: str) -> Process:
    """Run a snippet in a new interpreter, with extra folders first on its path."""
    path = os.pathsep.join([*map(str, first_on_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
    )
    return Process(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class CommandOutcome:
    """Exit code and output of a command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, parsed as one JSON object."""
        return json.loads(self.out)

    def assert_one_line_error(self, code: int, cause: str) -> None:
        """Assert that the command failed with one line on stderr that contains `cause`, and no traceback."""
        assert cause in self.err
        assert (self.code, self.out, self.err.count("\n")) == (code, "", 1), self.err
        assert "Traceback" not in self.err and "this is a bug" not in self.err


class Terminal(io.StringIO):
    """Text stream that reports to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True

    @property
    def plain(self) -> str:
        """Text of the terminal, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())
