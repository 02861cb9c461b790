"""Process that runs the items of one target: ``python -m draftmark_contract.judge.worker FILE``.

It writes one line of JSON before and one after each item, so that the parent process can tell which item crashed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from draftmark.errors import DraftmarkError

from ..check import Refused, Unjudged
from ..failing_batch import drawing
from ..runner.limits import LIMIT_S, time_limit
from ..runner.machine import here
from ..runner.parent import end_with_parent
from ..runner.resources import exhausted
from ..runner.session import DEVICE_LOST
from ..runner.stopped import RunStopped
from .devices import device_of
from .engines import engines
from .finding import finding
from .item import Item, Outcome, Result
from .target import GROUP, Target

OPENED, BEGUN, ENDED, FAILED, STOPPED = "opened", "begun", "ended", "failed", "stopped"
"""Kinds of lines: target opened (with its items), item started, item ended (with its result), target not opened, and
run stopped for a reason that is not the backend's."""
CANNOT_WRITE = 74
"""Exit code of a worker that cannot write its journal (EX_IOERR)."""


@dataclass(frozen=True)
class RunRequest:
    """Holds the arguments of a worker process.

    Attributes:
        engine, target, device: names of the engine, the backend and the torch device to open.
        command: command that judges the target, for `finding`.
        journal: file that the worker appends its lines to.
        items: ids to run; () for all.
        k: run only items with this text in their id.
        sample: maximum number of items per rule, evenly spread; 0 for all.
        skip: ids of items that have already ended.
        list_only: list the items without running any.
        stop_at_first: end after the first wrong item.
        limit: seconds for one item.
    """

    engine: str
    target: str
    device: str
    command: str
    journal: str
    items: tuple[str, ...] = ()
    k: str = ""
    sample: int = 0
    skip: tuple[str, ...] = ()
    list_only: bool = False
    stop_at_first: bool = False
    limit: float = LIMIT_S

    def chosen(self, known: Sequence[str]) -> list[str]:
        """Return the ids in `known` that this request selects, in their order."""
        wanted = [one for one in known if (not self.items or one in self.items) and self.k in one]
        by_rule: dict[str, list[str]] = {}
        for one in wanted:
            by_rule.setdefault(one.partition("[")[0], []).append(one)
        step = {rule: -(-len(mine) // self.sample) if self.sample else 1 for rule, mine in by_rule.items()}
        return [one for rule, mine in by_rule.items() for one in mine[:: step[rule]]]

    def as_json(self) -> str:
        """Return the request as one line of JSON."""
        return json.dumps(asdict(self))


def work(request: RunRequest) -> int:
    """Open the target, run its items, and return the exit code of the process."""
    with Path(request.journal).open("a", encoding="utf-8") as journal:

        def say(kind: str, value: Any) -> None:
            try:
                journal.write(json.dumps({kind: value}) + "\n")
                journal.flush()
            except OSError:
                # Exit without an exception: an engine could catch an exception, and a destructor could write again.
                os._exit(CANNOT_WRITE)

        try:
            target = engines()[request.engine].open(request.target, request.device)
            items = list(target.items())
        except DraftmarkError as error:
            say(FAILED, str(error))
            return 1
        say(OPENED, _about(request, target, items))
        wanted = set(request.chosen([item.id for item in items])) - set(request.skip)
        for item in items:
            if request.list_only or item.id not in wanted:
                continue
            say(BEGUN, item.id)
            try:
                result = run_item(item, request.command, request.limit)
            except RunStopped as stopped:
                say(STOPPED, str(stopped))
                return 0
            say(ENDED, result.as_json())
            if result.outcome is Outcome.WRONG and request.stop_at_first:
                return 0
            if result.outcome is Outcome.WRONG and (result.seconds >= request.limit or _lost(request.device)):
                return DEVICE_LOST  # After a time limit, native code may hold locks or have damaged memory.
    return 0


def _lost(device: str) -> bool:
    """Return True if an item destroyed the device context (illegal access). Other items then need a new process."""
    if device_of(device).host:
        return False
    import torch

    try:
        torch.ones(1, device=device).add(1).cpu()
    except RuntimeError:
        return True
    return False


def run_item(item: Item, command: str, limit: float = LIMIT_S) -> Result:
    """Run one item and return its result. An exception or a hang of the backend becomes a result too.

    Raises:
        RunStopped: the machine ran out of memory or disk, so the item gives no result for the backend.
    """
    start = time.monotonic()
    outcome, message, drawn = Outcome.RIGHT, "", None
    try:
        with time_limit(limit):
            item.run()
    except KeyboardInterrupt:
        raise
    except Refused as error:
        outcome, message = Outcome.NOT_SERVED, str(error)
    except Unjudged as error:
        outcome, message = Outcome.NOT_ASKED, str(error)
    except BaseException as error:  # An engine may raise any exception, including SystemExit.
        if reason := exhausted(error):
            raise RunStopped(f"in {item.id} {reason}") from error
        outcome, message, drawn = Outcome.WRONG, finding(error, item, command), drawing(error)
    return Result(item.id, outcome, message, round(time.monotonic() - start, 3), drawn)


def _about(request: RunRequest, target: Target, items: list[Item]) -> dict[str, Any]:
    rows = [{"id": one.id, "rule": one.rule, "case": one.case.id, "asks": one.asks} for one in items]
    adapter = next((one.dist for one in entry_points(group=GROUP, name=request.engine)), None)
    machine = here(("draftmark", "draftmark-contract", "torch", "triton", *([adapter.name] if adapter else [])))
    facts = dict(target.facts)
    return {"facts": facts, "machine": machine, "left_out": dict(target.left_out), "items": rows}


if __name__ == "__main__":
    end_with_parent()
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lists = {name: tuple(given[name]) for name in ("items", "skip")}
    sys.exit(work(RunRequest(**{**given, **lists})))
