"""The registry of checks.

A check is a function ``run(subject, value)`` in a module of `draftmark_contract.checks`, decorated with `check`.
Every backend runs the same cases. If the backend refuses the geometry, the item checks that every entry point
refuses it with the same reasons (`Refused`).

Modules in `checks/` must import without torch, so they import it inside functions only.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .oracle.truth import Row
    from .profiles import Features
    from .sizing.batches import BatchShape


T = TypeVar("T")
Run = TypeVar("Run", bound=Callable[..., None])


class Tier(StrEnum):
    """Resources that an item needs: integers only, CPU tensors, or a device. A run of a tier includes earlier tiers."""

    SIZING = "sizing"
    HOST = "host"
    DEVICE = "device"

    @property
    def includes(self) -> tuple[Tier, ...]:
        """Tiers that a run of this tier covers, in order; this tier is last."""
        order = tuple(Tier)
        return order[: order.index(self) + 1]


class Need(StrEnum):
    """Abilities of a subject, or of the machine, that a check uses. An item that lacks one of them is unjudged."""

    HOOKS = "hooks"
    """A draftmark plugin: the check calls its hooks."""
    SIZES = "sizes"
    """Declared sizes of every buffer."""
    METADATA = "metadata"
    """Metadata with a declared meaning."""
    FORWARD = "forward"
    """Kernels that store KV and compute outputs of a batch."""
    GRAPHS = "graphs"
    """Forwards that are captured once and replayed."""
    PROOFS = "proofs"
    """The distribution draftmark-proof with its solver z3, installed on the machine."""


SIZES = (Need.HOOKS, Need.SIZES)
"""Needs of a check that asks a plugin for sizes."""
PROOFS = (*SIZES, Need.PROOFS)
"""Needs of a check that proves a plugin's sizes."""


@dataclass(frozen=True)
class Case:
    """One input of a check.

    Attributes:
        id: short stable slug. Results, known failures and ``-k`` use it.
        value: the input that the check receives.
        since: contract (major, minor) that added this input to its check.
        geometry: geometry, or tuple of geometries, that `profiles.needs` reads when `value` contains none.
    """

    id: str
    value: Any
    since: tuple[int, int] = (1, 0)
    geometry: Any = None

    @functools.cached_property
    def needs(self) -> Features:
        """Profiles (feature sets) that the case needs."""
        from .profiles import needs

        return needs(self.value if self.geometry is None else self.geometry)


@dataclass(frozen=True)
class Check:
    """Holds one rule of the contract and its inputs.

    Attributes:
        name: ``"module.function"``.
        tier: tier that the check runs in.
        cases: builds the inputs. They are the same for every backend, cheap to build, and need no torch.
        run: raises `ContractViolation` when the backend breaks the rule, and `Refused` when it refuses the geometry.
        since: contract (major, minor) that introduced the check. It is "upcoming" for a plugin with an older target.
        bugs: public issue threads with a bug of this class.
        doc: the rule: first line of the function's docstring.
        details: the rest of the docstring; empty when it has one line.
        needs: abilities of the subject that the check uses.
    """

    name: str
    tier: Tier
    cases: Callable[[], Sequence[Case]]
    run: Callable[[Any, Case], None]
    since: tuple[int, int]
    bugs: tuple[str, ...]
    doc: str
    details: str = ""
    needs: frozenset[Need] = frozenset()

    def item(self, case: Case) -> str:
        """Return the item's id: ``"sizing.covers[target-wall]"``."""
        return f"{self.name}[{case.id}]"


@dataclass(frozen=True)
class Wrong:
    """States where in a forward a fault is.

    Attributes:
        what: kind of fault: ``"output"``, ``"keys"`` (KV slots that a row reads) or ``"store"`` (KV slot of the row).
        rows: (request, row) of each wrong row. The violation's values belong to the first wrong row.
        missing: KV slots that the metadata of the first wrong row must name and does not.
        extra: KV slots that the metadata of the first wrong row names and must not.
        batch: the forward, if the violation describes it only as text.
    """

    what: str
    rows: Sequence[Row] = ()
    missing: Sequence[int] = ()
    extra: Sequence[int] = ()
    batch: object = None


@dataclass(frozen=True)
class TooSmall:
    """States that a buffer is too small for a batch. `declared` and `needed` are its two sizes in `unit`."""

    batch: BatchShape
    buffer: str
    declared: int
    needed: int
    unit: str


class ContractViolation(AssertionError):
    """A backend broke a rule of the contract. The message is complete enough for a bug report.

    Args:
        what: one sentence.
        batch: the (small) batch or geometry that shows the violation.
        got, expected: the wrong value, and the value that the rule requires.
        poison: explanation of `got` if it came from poisoned memory; see `harness.poison`.
        formula: source of the expected value, or of the plugin's value.
        bug: public issue thread about the same defect.
        remedy: change that fixes the defect.
        wrong: place of the fault in the batch, for a drawing; see `failing_batch`.

    Attributes:
        details: the arguments, keyed by the labels in the message.
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
        wrong: Wrong | TooSmall | None = None,
    ) -> None:
        self.what, self.wrong = what, wrong
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
    """The subject refuses an input for these reasons; the item ends as refused.

    A plugin's refusal is valid only if `BackendUnderTest.refusal` created it. If a plugin raises this class itself, the
    item ends as an error.
    """

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons
        super().__init__("; ".join(reasons))


class Unjudged(Exception):
    """The item cannot run on this subject, machine or release; the message names what is missing."""


ORDER_OF_LEARNING = (
    *("load", "supports", "sizing", "tightness", "overflow", "proof"),
    *("metadata", "numerics", "padding", "lengths", "purity", "guards", "history", "tree_ops", "graphs", "late"),
)
"""Check modules in the order in which the author of a backend meets them. Other modules follow these."""
_REGISTRY: dict[str, Check] = {}
_UNAVAILABLE: dict[str, str] = {}


def check(
    *,
    tier: Tier,
    cases: Callable[[], Sequence[Case]],
    since: tuple[int, int] = (1, 0),
    bugs: Sequence[str] = (),
    needs: Collection[Need] = (Need.HOOKS,),
) -> Callable[[Run], Run]:
    """Register ``run(subject, value)`` as a check named ``module.function``, and return the function unchanged."""

    def register(run: Run) -> Run:
        name = f"{run.__module__.rpartition('.')[2]}.{run.__name__}"
        doc, _, details = inspect.cleandoc(run.__doc__ or "").partition("\n")

        def on_case(subject: Any, case: Case) -> None:
            run(subject, case.value)

        built = functools.partial(_built, cases)
        more = (doc, details.strip(), frozenset(needs))
        _REGISTRY[name] = Check(name, tier, built, on_case, since, tuple(bugs), *more)
        return run

    return register


@functools.cache
def _built(cases: Callable[[], Sequence[Case]]) -> Sequence[Case]:
    """Return the cases of a function, built once although both tiers, and often several checks, use the function."""
    return cases()


def all_checks() -> list[Check]:
    """Return every check, ordered by tier and then by topic, simplest first. The first call imports `checks/`."""
    from . import checks

    for module in pkgutil.iter_modules(checks.__path__):
        _import(f"{checks.__name__}.{module.name}")
    # sorted() is stable, so the checks of one module stay in the order of their file.
    return sorted(_REGISTRY.values(), key=_rank)


def _rank(check: Check) -> tuple[int, int, str]:
    module = check.name.partition(".")[0]
    known = ORDER_OF_LEARNING.index(module) if module in ORDER_OF_LEARNING else len(ORDER_OF_LEARNING)
    return tuple(Tier).index(check.tier), known, module


def spread(cases: Sequence[T], most: int) -> Sequence[T]:
    """Return at most `most` cases, spread evenly over the list. The choice is deterministic; 0 returns all cases."""
    return cases[:: -(-len(cases) // most)] if most and cases else cases


def unavailable() -> dict[str, str]:
    """Return the check modules that could not be imported, each with the package it lacks. The verdict lists them."""
    return dict(_UNAVAILABLE)


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("draftmark"):
            raise
        _UNAVAILABLE[name.rpartition(".")[2]] = error.name
