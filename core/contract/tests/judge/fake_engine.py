"""Fake engine for tests of `draftmark judge`; its items have every possible outcome."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping, Sequence

from draftmark.errors import DraftmarkError
from draftmark_contract.check import ContractViolation, Refused, Unjudged
from draftmark_contract.judge.target import TargetInfo
from draftmark_contract.runner.item import Item, item_of

VARIABLE = "DRAFTMARK_FAKE_ENGINE"


def _right() -> None:
    if os.environ.get(VARIABLE) != "set":
        raise AssertionError("the environment of the target does not reach its process")


def _wrong() -> None:
    raise ContractViolation("the output is wrong", batch="r0: L=3 rows=1", got="1.5", expected="2.5 ± 0.1")


def _raises() -> None:
    raise RuntimeError("a kernel's own words")


def _dies() -> None:
    os._exit(9)


def _refused() -> None:
    raise Refused("head_size not supported")


def _no_device() -> None:
    raise Unjudged("there is no graph on a CPU")


def _killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, "full")


def _out_of_memory() -> None:
    raise MemoryError


def _interrupts() -> None:
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)


def _hangs() -> None:
    while True:  # Like native code that hangs: the time limit's exception does not end it.
        try:
            time.sleep(60)
        except BaseException:
            continue


HANGING = (
    item_of("repeats.give_the_same_bits", "hangs", _hangs),
    item_of("repeats.give_the_same_bits", "after", _right),
)
TWO = (item_of("repeats.give_the_same_bits", "a", _right), item_of("repeats.give_the_same_bits", "b", _right))
"""Two right items of one rule. A sample of one case runs only the first."""
STOPPING = (
    item_of("numerics.match_float64", "killed", _killed),
    item_of("numerics.match_float64", "disk", _full_disk),
    item_of("numerics.match_float64", "memory", _out_of_memory),
    item_of("numerics.match_float64", "interrupts", _interrupts),
)
"""Items that end the run for reasons that are not the backend's."""
ITEMS = (
    item_of("numerics.match_float64", "decode", _right),
    item_of("numerics.match_float64", "verify", _wrong, "the builder and the layer run one step"),
    item_of("numerics.match_float64", "extend", _wrong),
    item_of("numerics.serve_what_is_not_refused", "head-80", _refused),
    item_of("padding.changes_no_live_byte", "dies", _dies),
    item_of("graphs.replay_equals_eager", "decode", _no_device),
    item_of("repeats.give_the_same_bits", "raises", _raises),
    item_of("history.equals_a_fresh_state", "shrinks", _right),
)


RIGHT = ("numerics.match_float64[decode]", "history.equals_a_fresh_state[shrinks]")
REFUSED = next(one for one in ITEMS if one.case.id == "head-80")


class FakeTarget:
    """Backend that only returns the items (checks to run) that it was created with."""

    facts: Mapping[str, str] = {"engine": "fake 1.0", "device": "cpu"}
    left_out: Mapping[str, str] = {
        "proof": "nothing is declared that could be proved",
        "guards": "its buffers are its own",
    }

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def items(self) -> Sequence[Item]:
        """Return the items (checks to run) that the target was created with."""
        return self._items


class FakeEngine:
    """Fake engine with five backends: they pass, have every outcome, do not open, have no item, or stop the run."""

    name, install = "fake", "pip install fake-engine"

    def version(self) -> str | None:
        """Return a fixed release."""
        return "fake 1.0"

    def targets(self) -> Sequence[TargetInfo]:
        """Return all backends of the engine, and a further one that needs a missing Python module."""
        absent = TargetInfo("ABSENT", "needs more", needs=("no-such-module",), modules=("no_such_module",))
        names = ("RIGHT", "MIXED", "BROKEN", "EMPTY", "STOPPED")
        return [*(TargetInfo(name, f"backend {name.lower()}", ("cpu", "cuda")) for name in names), absent]

    def resolve(self, named: str) -> TargetInfo | None:
        """Return a target for a name with a dot, as for a class of another package."""
        return TargetInfo(named, "a class", any_device=True) if "." in named else None

    def environment(self, target: str, device: str) -> Mapping[str, str]:
        """Return the environment variable that the items check, so that tests see it reach the judging process."""
        return {VARIABLE: "set"}

    def open(self, target: str, device: str) -> FakeTarget:
        """Open a backend; the backend BROKEN raises an error."""
        if target == "BROKEN":
            raise DraftmarkError("its library cannot be loaded; reinstall it")
        right = [one for one in ITEMS if one.id in RIGHT]
        items = {
            "RIGHT": right,
            "EMPTY": [],
            "STOPPED": STOPPING,
            "package.Refuses": [REFUSED],
            "package.Right": right,
            "package.Two": TWO,
            "package.Hangs": HANGING,
        }
        return FakeTarget(items.get(target, ITEMS))


ENGINE = FakeEngine()
