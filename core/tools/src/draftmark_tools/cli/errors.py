"""Conversion of exceptions to one line on stderr and an exit code."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable

from draftmark.errors import DraftmarkError, GeometryError, RequestError

from .rendering import printable

SUCCESS, FAILURE, WRONG_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130


class ArgumentError(DraftmarkError):
    """An argument with the right type and a value that the command cannot use."""


def reported(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; print an exception as one line on stderr, and return the exit code.

    ``args.failure`` is the exit code for exceptions and lost output: `contract` and `judge` use 1 for a result.
    """
    _replace_closed_streams()
    _tolerate_narrow_encodings()
    failure: int = getattr(args, "failure", FAILURE)
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _drop_output()
        return failure
    except SystemExit as leaving:  # rich raises SystemExit when its pipe is broken
        return failure if leaving.code else SUCCESS
    except Exception as error:
        if getattr(args, "debug", False):
            traceback.print_exc()
        print(f"draftmark {args.command}: {sentence(error)}", file=sys.stderr)
        wrong = isinstance(error, (ArgumentError, GeometryError, RequestError))
        return WRONG_ARGUMENTS if wrong else failure


def sentence(error: BaseException) -> str:
    """Return one line for an exception; for an unexpected exception it includes how to report a bug."""
    text = printable(" ".join(str(error).split()))
    if isinstance(error, DraftmarkError):
        return text
    if isinstance(error, OSError) and error.filename is not None:
        return f"{printable(str(error.filename))}: {error.strerror}; check the path and its permissions"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "the output could not be written: no space left on the device; free space, or write elsewhere"
    if _is_out_of_memory(error):
        return f"out of memory: {text}; use fewer requests, a shorter context or smaller pages (`draftmark size NAME`)"
    return f"{type(error).__name__}: {text}; this is a bug: run again with --debug and report the output"


def _is_out_of_memory(error: BaseException) -> bool:
    """Return True for errors of Python, of a device, or of torch's CPU allocator, which raises a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _drop_output() -> None:
    # The reader has closed the pipe (`draftmark size … | head`); the last flush at exit must not raise again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_closed_streams() -> None:
    """Open the null device for streams that the caller has closed (``>&-``), so that no file gets their numbers."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open until the process ends


def _tolerate_narrow_encodings() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
