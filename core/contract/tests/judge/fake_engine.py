"""Fake engine for tests of `draftmark judge`; its items have every possible outcome."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from draftmark.errors import DraftmarkError
from draftmark_contract.check import ContractViolation
from draftmark_contract.judge.item import Item, NotAsked, NotServed
from draftmark_contract.judge.target import TargetInfo

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
    raise NotServed("head_size not supported")


def _no_device() -> None:
    raise NotAsked("there is no graph on a CPU")


ITEMS = (
    Item("numerics.match_float64", "decode", _right),
    Item("numerics.match_float64", "verify", _wrong, "the builder and the layer run one step"),
    Item("numerics.match_float64", "extend", _wrong),
    Item("numerics.serve_what_is_not_refused", "head-80", _refused),
    Item("padding.changes_no_live_byte", "dies", _dies),
    Item("graphs.replay_equals_eager", "decode", _no_device),
    Item("repeats.give_the_same_bits", "raises", _raises),
    Item("history.equals_a_fresh_state", "shrinks", _right),
)


class FakeTarget:
    """Target without a backend."""

    facts: Mapping[str, str] = {"engine": "fake 1.0", "device": "cpu"}
    left_out: Mapping[str, str] = {
        "proof": "nothing is declared that could be proved",
        "guards": "its buffers are its own",
    }

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def items(self) -> Sequence[Item]:
        """Return the items that the target was created with."""
        return self._items


class FakeEngine:
    """Engine with three backends: RIGHT passes, MIXED has every outcome, BROKEN does not open."""

    name, install = "fake", "pip install fake-engine"

    def version(self) -> str | None:
        """Return a fixed release."""
        return "fake 1.0"

    def targets(self) -> Sequence[TargetInfo]:
        """Return the three backends, and one that lacks a module."""
        absent = TargetInfo("ABSENT", "needs more", needs=("no-such-module",), modules=("no_such_module",))
        names = ("RIGHT", "MIXED", "BROKEN")
        return [*(TargetInfo(name, f"backend {name.lower()}", ("cpu", "cuda")) for name in names), absent]

    def environment(self, target: str, device: str) -> Mapping[str, str]:
        """Return the variable that the items check."""
        return {VARIABLE: "set"}

    def open(self, target: str, device: str) -> FakeTarget:
        """Open RIGHT or MIXED; raise an error for BROKEN."""
        if target == "BROKEN":
            raise DraftmarkError("its library cannot be loaded; reinstall it")
        return FakeTarget([one for one in ITEMS if one.run is _right] if target == "RIGHT" else ITEMS)


ENGINE = FakeEngine()
