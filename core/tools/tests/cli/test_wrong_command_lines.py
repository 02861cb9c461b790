"""Command lines that core's commands reject: one line, exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

WRONG = {
    "an unknown command": (("lst",), "invalid choice: 'lst'"),
    "an option without a command": (("--json",), "the following arguments are required: COMMAND"),
    "size without a backend": (("size",), "the following arguments are required: NAME; see `draftmark size --help`"),
    "size of two": (("size", "reference", "other"), "unrecognized arguments: other; see `draftmark size --help`"),
    "a number with a point": (("size", "reference", "--topk", "1e3"), "argument --topk: invalid int value: '1e3'"),
    "a mode instead of a model": (("size", "reference", "--modes", "VERIFY"), "'VERIFY' is not a valid Mode"),
    "requests beyond int32": (("size", "reference", "--max-num-reqs", 10**20), "it must fit int32"),
    "list with a name": (("list", "reference"), "unrecognized arguments: reference; see `draftmark list --help`"),
    "doctor of two": (("doctor", "reference", "other"), "unrecognized arguments: other; see `draftmark doctor --help`"),
    "a package without a name": (("new-backend",), "the following arguments are required: NAME"),
    "a name with a space": (("new-backend", "my backend"), "lower-case letters, digits and _"),
    "a name that is a path": (("new-backend", "../evil"), "backend name is '../evil'"),
    "a name beyond ASCII": (("new-backend", "ünï"), "backend name is 'ünï'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_command_line_prints_one_line(draftmark: Run, kind: str) -> None:
    """The error line contains the wrong argument and the `--help` command of the called command."""
    argv, cause = WRONG[kind]
    draftmark(*argv).assert_one_line_error(2, cause)
