"""Process that opens one subject and runs the items that its parent process sends.

    python -m draftmark_contract.runner.worker PARENT

The parent writes one JSON line per command to stdin: ``{"open": Opening}``, ``{"list": null}`` or ``{"run": item}``.
Each command has one line of answer. What the backend writes to stdout goes to stderr. The process ends at the end of
stdin, and with its parent.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import replace
from enum import StrEnum
from typing import Any, TextIO

from draftmark.errors import DraftmarkError

from .limits import LIMIT_S
from .outcome import Outcome
from .parent import end_with_parent
from .stopped import MemoryRanOut, RunStopped
from .subject import Subject

LOST = "after this item the device accepted no more work from this process"


class Answer(StrEnum):
    """Keys of the lines that a worker process writes."""

    OPENED = "opened"
    """The subject is open: its facts."""
    FAILED = "failed"
    """The subject could not be opened: the reason."""
    LISTED = "listed"
    """Its items, and the rules that have none."""
    ENDED = "ended"
    """An item has ended: its result, and whether the process can run another item."""
    LACKED = "lacked"
    """Memory ran out in the item: the reason. The process ends."""
    STOPPED = "stopped"
    """The run cannot go on, for a reason that is not the backend's."""


def work(commands: TextIO, answers: TextIO) -> None:
    """Carry out commands until their stream ends, or until an item leaves this process unusable."""

    def say(kind: Answer, value: Any) -> None:
        answers.write(json.dumps({kind: value}) + "\n")
        answers.flush()

    subject: Subject | None = None
    limit = LIMIT_S
    for line in commands:
        [(command, value)] = json.loads(line).items()
        try:
            if command == "open":
                limit = value["arguments"].get("limit", LIMIT_S)
                subject = importlib.import_module(value["module"]).open_subject(**value["arguments"])
                assert subject is not None
                say(Answer.OPENED, subject.opened.as_json())
            elif command == "list":
                assert subject is not None
                rows = [one.as_json() for one in subject.items()]
                say(Answer.LISTED, {"items": rows, "left_out": dict(subject.left_out)})
            else:
                assert subject is not None
                more = _run(subject, value, limit, say)
                if not more:
                    return
        except DraftmarkError as error:
            say(Answer.FAILED, str(error))
            return
        except MemoryRanOut as ran_out:
            say(Answer.LACKED, str(ran_out))
            return
        except RunStopped as stopped:
            say(Answer.STOPPED, str(stopped))
            return
        except Exception as error:  # An item's own errors are results; this one is the suite's.
            where = "opening it raised" if command == "open" else "the suite raised an internal error:"
            say(Answer.STOPPED, f"{where} {type(error).__name__}: {error}")
            raise


def _run(subject: Subject, item: str, limit: float, say: Any) -> bool:
    """Run one item and answer with its result. Return False if this process can run no other item.

    After an illegal memory access every call on the device fails. After a time limit, native code may hold locks.
    """
    result = subject.run(item)
    failed = result.outcome in (Outcome.FAILED, Outcome.DECLARED, Outcome.UPCOMING)
    lost = failed and subject.lost()
    if lost:
        result = replace(result, message=f"{result.message}\n{LOST}")
    more = not lost and not (failed and result.seconds >= limit)
    say(Answer.ENDED, {"result": result.as_json(), "more": more})
    return more


def main() -> None:
    """Take the two pipes of the parent process away from the backend, and work."""
    end_with_parent(int(sys.argv[1]))
    commands, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    work(commands, answers)


if __name__ == "__main__":
    main()
