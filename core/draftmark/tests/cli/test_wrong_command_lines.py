"""Command lines that ask the core for what there is not: one sentence, exit code 2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

WRONG = {
    "a command that there is not": (("lst",), "invalid choice: 'lst'"),
    "an option without a command": (("--json",), "the following arguments are required: COMMAND"),
    "sizes of nobody": (("size",), "the following arguments are required: NAME; see `draftmark size --help`"),
    "sizes of two": (("size", "reference", "other"), "unrecognized arguments: other; see `draftmark size --help`"),
    "a number with a point": (("size", "reference", "--topk", "1e3"), "argument --topk: invalid int value: '1e3'"),
    "a mode by its name": (("size", "reference", "--modes", "VERIFY"), "invalid choice: 'VERIFY'"),
    "requests beyond int32": (("size", "reference", "--max-num-reqs", 10**20), "it must fit int32"),
    "a list of one": (("list", "reference"), "unrecognized arguments: reference; see `draftmark list --help`"),
    "two patients": (("doctor", "reference", "other"), "unrecognized arguments: other; see `draftmark doctor --help`"),
    "a package without a name": (("new-backend",), "the following arguments are required: NAME"),
    "a name with a space": (("new-backend", "my backend"), "lower-case letters, digits and _"),
    "a name that is a path": (("new-backend", "../evil"), "backend name is '../evil'"),
    "a name beyond ASCII": (("new-backend", "ünï"), "backend name is 'ünï'"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_it_is_refused_in_one_sentence(draftmark: Run, kind: str) -> None:
    """What is wrong with it, and the help of the very command."""
    argv, cause = WRONG[kind]
    draftmark(*argv).is_one_sentence(2, cause)
