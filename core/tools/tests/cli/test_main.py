"""Behaviour of every command: help, version, exit codes, one-line errors."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from draftmark import CONTRACT_MAJOR, CONTRACT_MINOR, DraftmarkError, __version__
from draftmark_tools.cli.commands import PARTS, command, installed
from draftmark_tools.cli.commands import list as list_command
from draftmark_tools.cli.errors import sentence

Run = Callable[..., Any]
COMMANDS = installed()


def test_version_includes_the_contract(draftmark: Run) -> None:
    """`--version` prints the release and the contract, and succeeds."""
    done = draftmark("--version")
    assert (done.code, done.out) == (0, f"draftmark {__version__} (contract v{CONTRACT_MAJOR}.{CONTRACT_MINOR})\n")


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_has_examples(draftmark: Run, name: str) -> None:
    """Every `--help` succeeds and ends with examples that start with the program's name."""
    done = draftmark(*filter(None, [name]), "--help")
    assert done.code == 0
    assert f"examples:\n  draftmark {name}".rstrip() in done.out


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_fits_a_terminal(draftmark: Run, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Help lines have at most 80 columns; a default of 0 is printed, an empty default is not."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = draftmark(*filter(None, [name]), "--help").out
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert "(default: ())" not in shown and "(default: (" not in shown
    if name == "size":
        assert "0 means no cap (default: 0.0)" in " ".join(shown.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_real_command_lines(name: str) -> None:
    """The parser accepts every example in the help."""
    import shlex

    from draftmark_tools.cli.parser import parse

    lines = [line.strip() for line in command(COMMANDS[name]).EXAMPLES.splitlines()]
    examples = [line for line in lines if line.startswith("draftmark ")]
    assert examples
    for line in examples:
        _, args = parse(shlex.split(line)[1:])
        assert args.command == name


@pytest.mark.parametrize("name", PARTS)
def test_an_absent_command_is_named_with_its_pip_line(
    draftmark: Run, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a command's distribution is not installed, the command prints one line with the pip command to install it."""
    without = {key: entry for key, entry in COMMANDS.items() if key != name}
    monkeypatch.setattr("draftmark_tools.cli.parser.installed", lambda: without)
    done = draftmark(name, "anything")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert PARTS[name] in done.err
    assert PARTS[name] in draftmark("--help").out


def test_no_command_is_a_wrong_argument(draftmark: Run) -> None:
    """Without a command the help goes to stderr, and the exit code is 2."""
    done = draftmark()
    assert (done.code, done.out) == (2, "")
    assert "examples:" in done.err


@pytest.mark.parametrize(
    "argv",
    [("sail",), ("list", "--no-such"), ("size",), ("size", "reference", "--topk", "two"), ("generate", "--topk")],
)
def test_wrong_arguments_take_one_line(draftmark: Run, argv: tuple[str, ...]) -> None:
    """Wrong arguments print one line that names the help command, with exit code 2."""
    done = draftmark(*argv)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "--help`" in done.err


def _raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(args: argparse.Namespace) -> NoReturn:
        raise error

    monkeypatch.setattr(list_command, "run", run)


def test_interrupt_is_quiet(draftmark: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C prints nothing and exits 130."""
    _raising(monkeypatch, KeyboardInterrupt())
    done = draftmark("list")
    assert (done.code, done.out, done.err) == (130, "", "")


def test_an_unexpected_error_takes_one_line(draftmark: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected exception prints one line that recommends --debug, with exit code 1."""
    _raising(monkeypatch, KeyError("depth"))
    done = draftmark("list")
    assert done.code == 1
    assert done.err.startswith("draftmark list: KeyError: 'depth'; this is a bug: run again with --debug")
    assert done.err.count("\n") == 1


def test_debug_shows_the_traceback(draftmark: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --debug the traceback is printed before the error line."""
    _raising(monkeypatch, KeyError("depth"))
    done = draftmark("list", "--debug")
    assert done.code == 1
    assert done.err.startswith("Traceback")


def test_a_closed_pipe_is_no_error() -> None:
    """A closed pipe (`draftmark size … | true`) prints nothing on stderr."""
    line = f"{sys.executable} -m draftmark_tools.cli size reference --json | true"
    done = subprocess.run(line, shell=True, capture_output=True, text=True)
    assert done.stderr == ""


def test_narrow_encodings_do_not_end_a_command() -> None:
    """An ASCII terminal gets question marks, not a UnicodeEncodeError."""
    import os

    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    argv = [sys.executable, "-m", "draftmark_tools.cli", "size", "reference"]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "k?(S?1)" in done.stdout


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
        type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory"),
    ],
    ids=["disk", "python", "cpu", "device"],
)
def test_a_full_disk_or_memory_is_no_bug(error: Exception) -> None:
    """The error line for a full disk or full memory contains a remedy, and does not suggest a bug report."""
    text = sentence(error)
    assert "this is a bug" not in text
    assert "free space" in text or (text.startswith("out of memory") and "use fewer requests" in text)


@pytest.mark.parametrize(
    "text",
    ["\x1b[31mred\x1b[0m", "\x1b]0;title\x07red", "r\x08e\x9bd", "\x1bcred", "red\x00\x1b[2J\x1b[1;1H"],
)
def test_errors_cannot_control_the_terminal(text: str) -> None:
    """Escape sequences and control characters of an error, such as a plugin's, are removed."""
    assert sentence(DraftmarkError(f"{text}; remedy")) == "red; remedy"
