"""The walks through the suite that docs/design.md, section 7, counts: files on the calls from a name to its end.

    python -m tools.walks                                   # the table, on the reference
    python -m tools.walks 'numerics.match_float64[...]'      # the files of one item's walk

A walk follows real calls under a profiler. It counts the files of the suite on the call stack, in the order in which a
reader enters them. The walk to the assertion begins with the item in its worker process. It ends at the function that
compares the output. The walk to the verdict begins at the command. It passes the worker process and ends when the
verdict is printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import draftmark_contract

SUITE = str(Path(draftmark_contract.__file__).parent) + os.sep
BACKEND = "reference"
CHECKS = (
    "numerics.match_float64",
    "history.equals_a_fresh_state",
    "graphs.replay_equals_eager",
    "sizing.covers",
    "state.rounds_of_any_rows",
)
"""Checks with a walk of their first item: those that a review of 2026 walked, and one of recurrent state."""
TO_THE_VERDICT = ("send", "run_item", "judge", "word", "verdict_lines")
"""Functions at which the walk to the verdict looks at the call stack: the item leaves the parent process and runs; the
verdict is computed, gets its word and is printed."""


def walked(run: Callable[[], object], reaches: Callable[[str], bool]) -> list[list[str]]:
    """Run a function; return the suite's files on the stack, outermost first, at each call that `reaches` a name."""
    found: list[list[str]] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SUITE) and reaches(frame.f_code.co_name):
            found.append(_files(frame))

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def _files(frame: FrameType | None) -> list[str]:
    files: list[str] = []
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(SUITE) and name.removeprefix(SUITE) not in files:
            files.append(name.removeprefix(SUITE))
        frame = frame.f_back
    return files[::-1]


def item_of(check: str) -> str:
    """Return the id of a check's first item."""
    from draftmark_contract.runner.item import all_items

    return next(one.id for one in all_items(names=(check,)))


def to_the_assertion(item: str) -> list[str]:
    """Return the files from an item to the deepest function that asserts something about its output."""
    from draftmark_contract.runner.plugin import open_subject

    subject = open_subject(BACKEND, "host", "", [item], 600.0)
    subject.items()
    ways = walked(lambda: subject.run(item), lambda name: "assert" in name or "covers" in name)
    return max(ways, key=len)


def to_the_verdict(item: str) -> list[str]:
    """Return the files from the command to the printed verdict on a run of one item, the worker's among them."""
    from draftmark_contract.cli import contract
    from draftmark_contract.runner import worker
    from draftmark_contract.runner.plugin import opening

    opened = asdict(opening(BACKEND, items=[item]))
    commands = [{"open": {"module": opened["module"], "arguments": opened["arguments"]}}, {"run": item}]
    lines = io.StringIO("".join(json.dumps(one) + "\n" for one in commands))
    options = _options(contract, item)

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            contract.run(options)
            worker.work(lines, io.StringIO())

    ways = walked(run, lambda name: name in TO_THE_VERDICT)
    return list(dict.fromkeys(file for way in ways for file in way))


def _options(contract: Any, item: str) -> Namespace:
    import argparse

    parser = argparse.ArgumentParser()
    contract.configure(parser)
    return parser.parse_args([BACKEND, "--item", item], Namespace(command="contract"))


def table() -> str:
    """Return a Markdown table: the number of files from each item to its assertion, and from the backend's name on."""
    items = [item_of(check) for check in CHECKS]
    rows = [f"|{item}|its assertion|{len(to_the_assertion(item))}|" for item in items]
    rows.append(f"|{BACKEND}|its verdict|{len(to_the_verdict(items[0]))}|")
    return "\n".join(["|from|to|files|", "|---|---|---:|", *rows])


def main() -> None:
    """Print the table, or the files of the items on the command line."""
    if len(sys.argv) == 1:
        print(table())
    for item in sys.argv[1:]:
        print(item, *to_the_assertion(item), sep="\n  ")
        print(f"{BACKEND}, with this item", *to_the_verdict(item), sep="\n  ")


if __name__ == "__main__":
    main()
