"""An engine whose backends end in every way that an item can: what the frame of `draftmark judge` is tested on."""

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
    """Opened on nothing."""

    facts: Mapping[str, str] = {"engine": "fake 1.0", "device": "cpu"}
    left_out: Mapping[str, str] = {
        "proof": "nothing is declared that could be proved",
        "guards": "its buffers are its own",
    }

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items

    def items(self) -> Sequence[Item]:
        """All, or the right ones."""
        return self._items


class FakeEngine:
    """Two backends: one that is right, one that ends in every way."""

    name, install = "fake", "pip install fake-engine"

    def version(self) -> str | None:
        """Always there."""
        return "fake 1.0"

    def targets(self) -> Sequence[TargetInfo]:
        """And one that lacks a module."""
        absent = TargetInfo("ABSENT", "needs more", needs=("no-such-module",), modules=("no_such_module",))
        names = ("RIGHT", "MIXED", "BROKEN")
        return [*(TargetInfo(name, f"the {name.lower()} one", ("cpu", "cuda")) for name in names), absent]

    def environment(self, target: str, device: str) -> Mapping[str, str]:
        """What its items look for."""
        return {VARIABLE: "set"}

    def open(self, target: str, device: str) -> FakeTarget:
        """Either, or the error."""
        if target == "BROKEN":
            raise DraftmarkError("its library cannot be loaded; reinstall it")
        return FakeTarget([one for one in ITEMS if one.run is _right] if target == "RIGHT" else ITEMS)


ENGINE = FakeEngine()
