"""The process that runs the items of one target: ``python -m draftmark_contract.judge.worker FILE``.

It writes a line of JSON before and after each item, so that whoever started it knows where a crash was.
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

from ..runner.limits import LIMIT_S, time_limit
from ..runner.session import DEVICE_LOST
from .engines import engines
from .finding import finding
from .item import Item, NotAsked, NotServed, Outcome, Result
from .target import Target

OPENED, BEGUN, ENDED, FAILED = "opened", "begun", "ended", "failed"
"""Kinds of lines: the target with its items, an item, its result, and why the target could not be opened."""


@dataclass(frozen=True)
class RunRequest:
    """What a worker is reported.

    Attributes:
        engine, target, device: what to open.
        command: see `finding`.
        journal: the file that its lines are appended to.
        items: ids to run; () for all. k: run those alone whose id contains it.
        sample: at most so many of each rule, evenly spread; 0 for all.
        skip: ids that have ended already. list_only: run none.
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
        """Of all ids those to run, in their request."""
        wanted = [one for one in known if (not self.items or one in self.items) and self.k in one]
        by_rule: dict[str, list[str]] = {}
        for one in wanted:
            by_rule.setdefault(one.partition("[")[0], []).append(one)
        step = {rule: -(-len(mine) // self.sample) if self.sample else 1 for rule, mine in by_rule.items()}
        return [one for rule, mine in by_rule.items() for one in mine[:: step[rule]]]

    def as_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def work(request: RunRequest) -> int:
    """Open the target and run its items; the exit code of the process."""
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
    """Whether an item cost the process its device, as an illegal access does: the rest needs another process."""
    if device == "cpu":
        return False
    import torch

    try:
        torch.ones(1, device=device).add(1).cpu()
    except RuntimeError:
        return True
    return False


def run_item(item: Item, command: str) -> Result:
    """Run one item. Whatever the backend raises or hangs in becomes a result."""
    start = time.monotonic()
    outcome, message = Outcome.RIGHT, ""
    try:
        with time_limit(LIMIT_S):
            item.run()
    except KeyboardInterrupt:
        raise
    except NotServed as error:
        outcome, message = Outcome.NOT_SERVED, str(error)
    except NotAsked as error:
        outcome, message = Outcome.NOT_ASKED, str(error)
    except BaseException as error:  # an engine may raise anything, SystemExit included
        outcome, message = Outcome.WRONG, finding(error, item, command)
    return Result(item.id, outcome, message, round(time.monotonic() - start, 3))


def _about(target: Target, items: list[Item]) -> dict[str, Any]:
    asked = [{"id": one.id, "rule": one.rule, "case": one.case, "asks": one.asks} for one in items]
    return {"facts": dict(target.facts), "left_out": dict(target.left_out), "items": asked}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    lists = {name: tuple(given[name]) for name in ("items", "skip")}
    sys.exit(work(RunRequest(**{**given, **lists})))
