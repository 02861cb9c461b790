"""Interface between the runner and what it judges: a plugin's backend, or one layer of an engine.

A worker process opens one subject, lists its items, and runs each item that the parent process names. The parent
process never imports a backend: it knows a subject as `Opened` and `Listed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from draftmark.version import CONTRACT_MINOR

from ..check import Tier
from ..profiles import Features, Profile
from .identity import Part
from .item import Item
from .outcome import Result


class Kind(StrEnum):
    """Kinds of subjects."""

    PLUGIN = "plugin"
    """A backend with draftmark's interface."""
    LAYER = "layer"
    """An attention backend of an engine, tested through the engine's own interface."""


@dataclass(frozen=True)
class Opening:
    """Names the function that opens a subject in a worker process.

    Attributes:
        module: module with a function ``open_subject(**arguments)`` that returns a `Subject`.
        arguments: its arguments, as values of JSON.
        environment: environment variables of the worker process.
    """

    module: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Opened:
    """Facts about an open subject that its verdict needs.

    Attributes:
        name: name in the verdict, e.g. ``"reference"`` or ``"vllm:CPU_ATTN"``.
        kind: kind of subject.
        command: command that judges it, e.g. ``"draftmark contract reference"``.
        machine: date, machine and versions of the worker process, see `machine`.
        parts: parts of the code that a result depends on.
        facts: facts that the verdict lists: engine with its release, torch, device.
        info: the plugin's description of itself.
        known: entries of the plugin's `contract.toml`.
        minor: minor version of the contract that the subject targets.
        kernels: True if the backend's own kernels run in the host tier.
        unavailable: modules of checks that could not be imported → the missing package.
    """

    name: str
    kind: Kind
    command: str
    machine: Mapping[str, Any] = field(default_factory=dict)
    parts: Sequence[Part] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    info: Mapping[str, Any] = field(default_factory=dict)
    known: Sequence[Mapping[str, str]] = ()
    minor: int = CONTRACT_MINOR
    kernels: bool = True
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the facts as plain types."""
        return {**asdict(self), "parts": [{**asdict(one), "root": str(one.root)} for one in self.parts]}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Opened:
        """Read facts that `as_json` returned."""
        parts = [
            Part(one["name"], Path(one["root"]), *(tuple(one[key]) for key in ("only", "without", "but")))
            for one in row["parts"]
        ]
        return cls(**{**row, "kind": Kind(row["kind"]), "parts": parts})


@dataclass(frozen=True)
class Listed:
    """An item of a subject as the parent process knows it.

    Attributes:
        id: id of the item, ``"check[case]"``.
        tier: tier of its check.
        since: first contract, as (major, minor), that has the item.
        needs: profiles that it needs.
    """

    id: str
    tier: Tier
    since: tuple[int, int] = (1, 0)
    needs: Features = frozenset()

    @classmethod
    def of(cls, item: Item, tier: Tier | None = None) -> Listed:
        """Return an item's row. `tier` replaces the tier of its check."""
        return cls(item.id, tier or item.tier, item.since, item.needs)

    def as_json(self) -> list[Any]:
        """Return the row as plain types."""
        return [self.id, self.tier.value, *self.since, *sorted(self.needs)]

    @classmethod
    def from_json(cls, row: Sequence[Any]) -> Listed:
        """Read a row that `as_json` returned."""
        item, tier, major, minor, *needs = row
        return cls(item, Tier(tier), (major, minor), frozenset(map(Profile, needs)))


class Subject(Protocol):
    """A backend that is open in this process, which is a worker process."""

    @property
    def opened(self) -> Opened:
        """Facts for the verdict."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Rules that have no item for this subject → the reason. Keys are rules or their modules (``"proof"``)."""

    def items(self) -> Sequence[Listed]:
        """Return all items in the order in which they must run. Listing them runs nothing of the backend."""

    def run(self, item: str) -> Result:
        """Run the item with this id. Whatever the backend raises becomes part of the result.

        Raises:
            RunStopped: the machine ran out of memory or disk, so the item gives no result for the backend.
        """

    def lost(self) -> bool:
        """Return True if the device accepts no more work from this process, e.g. after an illegal memory access."""
