"""What one `draftmark contract` asks for, and what is wrong with that before any item runs."""

from __future__ import annotations

import difflib
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ..check import Tier
from .item import all_items


class WrongArguments(ValueError):
    """A run that cannot be done as asked; the message says what to change."""


@dataclass(frozen=True)
class Asked:
    """One run.

    Attributes:
        name: the backend.
        tier: run up to this one; with `items`, the highest tier of those.
        json_path, record_path, html_path: where to write the verdict in full, in short, and as a page.
        k: pytest's -k expression.
        items: ids of the items to run; () for all.
        device: torch device of the device tier.
        workers: pytest-xdist processes; 0 for none.
        sample: at most so many cases of each check, evenly spread; 0 for all.
        journal_path: a file that keeps each item's result.
        allow_known: exit code 0 where all that fails is declared.
        seed: of the drawn histories; None for what the environment says, else 0.
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

    @property
    def highest(self) -> Tier:
        """The tier that the run goes up to."""
        tiers = {item.id: item.tier for item in all_items()} if self.items else {}
        order = tuple(Tier)
        return max((tiers[item] for item in self.items), key=order.index) if self.items else Tier(self.tier)

    def check(self) -> None:
        """Raise `WrongArguments` for the first thing that would end the run, or lose its verdict, later on."""
        if self.tier not in {one.value for one in Tier}:
            raise WrongArguments(f"tier is {self.tier!r}, but it must be sizing, host or device")
        for option, count, unasked in (("--sample", self.sample, "all"), ("--workers", self.workers, "none")):
            if count < 0:
                raise WrongArguments(f"{option} is {count}, but it counts from 0 on; 0 stands for {unasked}")
        # With --item it may stand: the line that runs a failed item again has the device of the run that it failed in.
        if self.device and not self.items and self.tier != Tier.DEVICE:
            raise WrongArguments(f"--device {self.device} goes with --tier device; the {self.tier} tier is of the CPU")
        if self.seed is not None and self.journal_path:
            raise WrongArguments("--seed goes with no --journal: it would keep results of one seed for another")
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

    def _check_item(self, item: str) -> None:
        known = [one.id for one in all_items()]
        if item not in known:
            close = difflib.get_close_matches(item, known, 3)
            near = f"; close to it are {', '.join(close)}" if close else "; -k TEXT selects by a part of their names"
            raise WrongArguments(f"--item {item!r} is no item of the suite{near}")


def _check_output(option: str, path: Path) -> None:
    if path.is_dir():
        raise WrongArguments(f"{option} {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise WrongArguments(f"{option} {path} lies in a folder that does not exist; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise WrongArguments(f"{option} {path} cannot be written; name another file")
