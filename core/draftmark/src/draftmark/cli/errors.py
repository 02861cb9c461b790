"""From exceptions to one sentence on stderr and an exit code."""

from __future__ import annotations

import argparse
import errno
import os
import sys
import traceback
from collections.abc import Callable

from ..errors import DraftmarkError, GeometryError, RequestError

SUCCESS, FAILURE, WRONG_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130


class ArgumentError(DraftmarkError):
    """An argument that argparse takes and the command cannot use."""


def reported(run: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command; turn whatever it raises into a sentence and an exit code."""
    _tolerate_narrow_encodings()
    try:
        code = run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        return _broken_pipe()
    except SystemExit as leaving:  # rich leaves this way when its pipe is broken
        return FAILURE if leaving.code else SUCCESS
    except Exception as error:
        if getattr(args, "debug", False):
            traceback.print_exc()
        print(f"draftmark {args.command}: {sentence(error)}", file=sys.stderr)
        wrong = isinstance(error, (ArgumentError, GeometryError, RequestError))
        return WRONG_ARGUMENTS if wrong else FAILURE


def sentence(error: BaseException) -> str:
    """One line for an error; one that nobody raised on purpose says so and how to see more."""
    text = " ".join(str(error).split())
    if isinstance(error, DraftmarkError):
        return text
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path and its permissions"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "what it prints could not be written: no space is left on that device; make room, or write elsewhere"
    if _is_out_of_memory(error):
        return f"out of memory: {text}; take fewer requests, a shorter context or smaller pages (`draftmark size NAME`)"
    return f"{type(error).__name__}: {text}; this is a bug: run again with --debug and report what it prints"


def _is_out_of_memory(error: BaseException) -> bool:
    """Of Python, of a device, or of torch's allocator for a CPU, which raises a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _broken_pipe() -> int:
    # The reader has gone (`draftmark size … | head`); the interpreter's last flush must not complain either.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return FAILURE


def _tolerate_narrow_encodings() -> None:
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="replace")
