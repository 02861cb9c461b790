"""Holds the options of one `draftmark contract` run, and checks them before any item runs."""

from __future__ import annotations

import difflib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ..check import Tier
from ..profiles import OF_STATE
from .item import all_items


class WrongArguments(ValueError):
    """The options do not allow a run; the message contains the remedy."""


@dataclass(frozen=True)
class RunOptions:
    """Holds the options of one run.

    Attributes:
        name: name of the backend.
        tier: highest tier to run; ignored with `items`, which set their own highest tier.
        json_path, record_path, html_path: files for the full verdict, the short record and the HTML page, or None.
        k: pytest's -k expression.
        items: ids of the items to run; () for all.
        device: torch device of the device tier; None for the backend's own.
        workers: number of pytest-xdist processes; 0 to run without xdist.
        sample: maximum number of cases per check, evenly spread; 0 for all.
        journal_path: file that keeps each item's result; None for a temporary one.
        allow_known: return exit code 0 if all failures are declared.
        seed: seed of the random histories; None for the environment variable's, or 0 if it is not set.
        stop_at_first: end the run at the first failed item.
    """

    name: str
    tier: str = Tier.HOST
    json_path: str | None = None
    record_path: str | None = None
    html_path: str | None = None
    k: str | None = None
    items: tuple[str, ...] = ()
    device: str | None = None
    workers: int = 0
    sample: int = 0
    journal_path: str | None = None
    allow_known: bool = False
    seed: int | None = None
    stop_at_first: bool = False

    @property
    def highest(self) -> Tier:
        """Highest tier that the run includes."""
        tiers = {item.id: item.tier for item in all_items()} if self.items else {}
        order = tuple(Tier)
        return max((tiers[item] for item in self.items), key=order.index) if self.items else Tier(self.tier)

    def check(self) -> None:
        """Raise `WrongArguments` for the first option that would prevent the run, or lose its verdict."""
        if self.tier not in {one.value for one in Tier}:
            raise WrongArguments(f"unknown tier {self.tier!r}; write sizing, host or device")
        for option, count, unasked in (("--sample", self.sample, "all"), ("--workers", self.workers, "none")):
            if count < 0:
                raise WrongArguments(f"{option} is {count}, but it must be 0 or more; 0 means {unasked}")
        # --item accepts --device at any tier: the command that repeats a failed item names the device of the failed
        # run.
        if self.device and not self.items and self.tier != Tier.DEVICE:
            raise WrongArguments(f"--device {self.device} needs --tier device; the {self.tier} tier runs on the CPU")
        if self.seed is not None and self.journal_path:
            raise WrongArguments("--seed cannot be used with --journal, which would mix results of two seeds; drop one")
        if self.k:
            _check_expression(self.k)
        for item in self.items:
            self._check_item(item)
        if self.workers and importlib.util.find_spec("xdist") is None:
            raise WrongArguments("--workers needs pytest-xdist: pip install pytest-xdist")
        if self.highest is not Tier.SIZING and importlib.util.find_spec("torch") is None:
            remedy = "pip install 'draftmark-contract[torch]', or run --tier sizing"
            raise WrongArguments(f"the {self.highest} tier needs torch, which is not installed: {remedy}")
        outputs = {"--json": self.json_path, "--record": self.record_path, "--html": self.html_path}
        for option, path in (outputs | {"--journal": self.journal_path}).items():
            if path is not None:
                _check_output(option, Path(path).absolute())

    def check_stateless(self) -> None:
        """Raise `WrongArguments` for an item of recurrent state, if the backend serves none: it has no such item."""
        of_state = {one.id for one in all_items() if one.needs & OF_STATE} if self.items else set()
        for item in of_state.intersection(self.items):
            raise WrongArguments(
                f"--item {item!r} is for layers with recurrent state, but {self.name} lists none in "
                "BackendInfo.recurrences; choose another item, or a backend such as reference"
            )

    def _check_item(self, item: str) -> None:
        known = [one.id for one in all_items()]
        if item not in known:
            close = difflib.get_close_matches(item, known, 3)
            near = f"; close to it are {', '.join(close)}" if close else "; -k TEXT selects items by a part of the name"
            raise WrongArguments(f"--item {item!r} is no item of the suite{near}")


def _check_expression(k: str) -> None:
    """Raise `WrongArguments` if pytest rejects the expression. This happens before any item runs."""
    from _pytest.mark.expression import Expression

    def match(name: str, /, **arguments: str | int | bool | None) -> bool:
        if arguments:
            raise SyntaxError(f"{name} takes no arguments in parentheses")
        return False

    try:
        Expression.compile(k).evaluate(match)
    except SyntaxError as error:
        remedy = "write names with and, or, not and parentheses, as in -k 'graphs and not wide'"
        raise WrongArguments(f"-k {k!r} is no expression: {error.msg}; {remedy}") from None


def _check_output(option: str, path: Path) -> None:
    if path.is_dir():
        raise WrongArguments(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise WrongArguments(f"{option} {path} lies in a folder that does not exist; create the folder first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise WrongArguments(f"{option} {path} cannot be written; name another file")
