"""The registry of checks.

A check is a function ``run(subject, value)`` in a module of `draftmark_contract.checks`, decorated with `check`.
Its cases are the same for every backend: a geometry that a backend refuses forwards "must work" into "must refuse
everywhere alike" (`Refused`), it never removes an item.

Modules in `checks/` are imported where torch may be absent: they import it inside functions only.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest


class Tier(StrEnum):
    """What an item needs: integers, CPU tensors, or the device. A run of a tier includes the tiers before it."""

    SIZING = "sizing"
    HOST = "host"
    DEVICE = "device"

    @property
    def includes(self) -> tuple[Tier, ...]:
        """The tiers that a run of this one covers, itself last."""
        order = tuple(Tier)
        return order[: order.index(self) + 1]


@dataclass(frozen=True)
class Case:
    """One input of a check.

    Attributes:
        id: a short stable slug; results, known failures and -k go by it.
        since: contract (major, minor) in which the input joined its check.
        geometry: one that stands for the value where the value holds none; `profiles.needs` reads it.
    """

    id: str
    value: Any
    since: tuple[int, int] = (1, 0)
    geometry: Any = None


@dataclass(frozen=True)
class Check:
    """One rule and the inputs it is tried on.

    Attributes:
        name: ``"module.function"``.
        tier: where it runs.
        cases: builds its inputs; the same for every backend, cheap, no torch.
        run: raises `ContractViolation` when the rule is broken, and the subject's own `Refused` when the geometry is.
        since: contract (major, minor) that introduced it; newer than a plugin's target means "upcoming".
        bugs: public threads that it is known from.
        doc: first line of the function's docstring.
    """

    name: str
    tier: Tier
    cases: Callable[[], Sequence[Case]]
    run: Callable[[BackendUnderTest, Case], None]
    since: tuple[int, int]
    bugs: tuple[str, ...]
    doc: str

    def item(self, case: Case) -> str:
        """The item's id: ``"sizing.covers[target-wall]"``."""
        return f"{self.name}[{case.id}]"


class ContractViolation(AssertionError):
    """A rule of the contract is broken; the message is complete enough for a bug report.

    Args:
        what: one sentence.
        batch: the (small) batch or geometry that shows it.
        got, expected: the two values.
        poison: what `got` means where it is memory that the suite had poisoned, see `harness.poison`.
        formula: where the expected value, or the plugin's, comes from.
        bug: a public thread with the same defect.
        remedy: what to change.

    Attributes:
        details: what the arguments said, by the words that the message shows.
    """

    def __init__(
        self,
        what: str,
        *,
        batch: Any = None,
        got: Any = None,
        expected: Any = None,
        poison: str = "",
        formula: str = "",
        bug: str = "",
        remedy: str = "",
    ) -> None:
        self.what = what
        self.details: dict[str, Any] = {
            "batch": batch,
            "got": got,
            "expected": expected,
            "poison": poison,
            "formula": formula,
            "known from": bug,
            "remedy": remedy,
        }
        super().__init__(what)

    def __str__(self) -> str:
        shown = [f"  {name}: {value}" for name, value in self.details.items() if value is not None and value != ""]
        return "\n".join([self.what, *shown])


class Refused(Exception):
    """The backend refuses this geometry, alike at every entry; the item then ends as refused.

    Only `BackendUnderTest.refusal` makes one that counts: raised by a plugin it is an exception like any other.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = tuple(reasons)
        super().__init__("; ".join(self.reasons))


ORDER_OF_LEARNING = (
    *("load", "supports", "sizing", "tightness", "overflow", "proof"),
    *("metadata", "numerics", "padding", "lengths", "purity", "guards", "history", "tree_ops", "graphs", "late"),
)
"""Modules of checks in the order in which somebody who writes a backend meets them; others come behind these."""
_REGISTRY: dict[str, Check] = {}
_UNAVAILABLE: dict[str, str] = {}


def check(
    *,
    tier: Tier,
    cases: Callable[[], Sequence[Case]],
    since: tuple[int, int] = (1, 0),
    bugs: Sequence[str] = (),
) -> Callable[[Callable[[BackendUnderTest, Any], None]], Callable[[BackendUnderTest, Any], None]]:
    """Register ``run(subject, value)`` as a check named ``module.function``; returns the function unchanged."""

    def register(run: Callable[[BackendUnderTest, Any], None]) -> Callable[[BackendUnderTest, Any], None]:
        name = f"{run.__module__.rpartition('.')[2]}.{run.__name__}"
        doc = (run.__doc__ or "").strip().partition("\n")[0]

        def on_case(subject: BackendUnderTest, case: Case) -> None:
            run(subject, case.value)

        _REGISTRY[name] = Check(name, tier, functools.cache(cases), on_case, since, tuple(bugs), doc)
        return run

    return register


def all_checks() -> list[Check]:
    """Every check by tier, and then in the order of learning. Imports the modules of `checks/` at the first call."""
    from . import checks

    for module in pkgutil.iter_modules(checks.__path__):
        _import(f"{checks.__name__}.{module.name}")
    return sorted(_REGISTRY.values(), key=_rank)  # stable: within a module, as its file has them


def _rank(check: Check) -> tuple[int, int, str]:
    module = check.name.partition(".")[0]
    known = ORDER_OF_LEARNING.index(module) if module in ORDER_OF_LEARNING else len(ORDER_OF_LEARNING)
    return tuple(Tier).index(check.tier), known, module


def spread(cases: Sequence[Case], most: int) -> Sequence[Case]:
    """At most `most` of the cases, evenly over their order and always the same ones; 0 for none left out."""
    return cases[:: -(-len(cases) // most)] if most and cases else cases


def unavailable() -> dict[str, str]:
    """Modules of checks that could not be imported, and what they lack; the verdict prints them as not run."""
    return dict(_UNAVAILABLE)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("draftmark"):
            raise
        _UNAVAILABLE[name.rpartition(".")[2]] = error.name
