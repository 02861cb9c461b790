"""Process that runs the items of one target: ``python -m draftmark_contract.judge.worker FILE``.

It writes one line of JSON before and one after each item, so that the parent process can tell which item crashed.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftmark.errors import DraftmarkError

from ..failing_batch import drawing
from ..runner.limits import LIMIT_S, time_limit
from ..runner.session import DEVICE_LOST
from .engines import engines
from .finding import finding
from .item import Item, NotAsked, NotServed, Outcome, Result
from .target import Target

OPENED, BEGUN, ENDED, FAILED = "opened", "begun", "ended", "failed"
"""Kinds of lines: target opened (with its items), item started, item ended (with its result), target not opened."""


@dataclass(frozen=True)
class RunRequest:
    """Arguments of a worker process.

    Attributes:
        engine, target, device: what to open.
        command: command that judges the target, for `finding`.
        journal: file that the worker appends its lines to.
        items: ids to run; () for all.
        k: run only items with this text in their id.
        sample: maximum number of items per rule, evenly spread; 0 for all.
        skip: ids of items that have already ended.
        list_only: list the items without running any.
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

    def chosen(self, known: Sequence[str]) -> list[str]:
        """Return the selected ids of `known`, in their order."""
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
            journal.write(json.dumps({kind: value}) + "\n")
            journal.flush()

        try:
            target = engines()[request.engine].open(request.target, request.device)
            items = list(target.items())
        except DraftmarkError as error:
            say(FAILED, str(error))
            return 1
        say(OPENED, _about(target, items))
        wanted = set(request.chosen([item.id for item in items])) - set(request.skip)
        for item in items:
            if request.list_only or item.id not in wanted:
                continue
            say(BEGUN, item.id)
            result = run_item(item, request.command)
            say(ENDED, result.as_json())
            if result.outcome is Outcome.WRONG and _lost(request.device):
                return DEVICE_LOST
    return 0


def _lost(device: str) -> bool:
    """Return True if an item destroyed the device context (illegal access): the rest needs a new process."""
    if device == "cpu":
        return False
    import torch

    try:
        torch.ones(1, device=device).add(1).cpu()
    except RuntimeError:
        return True
    return False


def run_item(item: Item, command: str) -> Result:
    """Run one item. Anything that the backend raises, and a hang, becomes a result."""
    start = time.monotonic()
    outcome, message, drawn = Outcome.RIGHT, "", None
    try:
        with time_limit(LIMIT_S):
            item.run()
    except KeyboardInterrupt:
        raise
    except NotServed as error:
        outcome, message = Outcome.NOT_SERVED, str(error)
    except NotAsked as error:
        outcome, message = Outcome.NOT_ASKED, str(error)
    except BaseException as error:  # an engine may raise anything, including SystemExit
        outcome, message, drawn = Outcome.WRONG, finding(error, item, command), drawing(error)
    return Result(item.id, outcome, message, round(time.monotonic() - start, 3), drawn)


def _about(target: Target, items: list[Item]) -> dict[str, Any]:
    rows = [{"id": one.id, "rule": one.rule, "case": one.case, "asks": one.asks} for one in items]
    return {"facts": dict(target.facts), "left_out": dict(target.left_out), "items": rows}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lists = {name: tuple(given[name]) for name in ("items", "skip")}
    sys.exit(work(RunRequest(**{**given, **lists})))
