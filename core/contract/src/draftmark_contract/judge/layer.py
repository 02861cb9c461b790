"""Opens an engine's backend as a subject: one layer, tested through the engine's own interface."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from pathlib import Path

from ..check import Need, Refused, Tier, Unjudged
from ..runner.identity import SUITE, Part
from ..runner.item import Item, run_item
from ..runner.limits import LIMIT_S
from ..runner.machine import here
from ..runner.outcome import Result
from ..runner.subject import Kind, Listed, Opened, Opening
from .devices import device_of
from .engines import engines
from .target import GROUP, Engine, Target


def opening(engine: Engine, target: str, device: str, limit: float = LIMIT_S) -> Opening:
    """Return the opening of one backend of an engine on a torch device."""
    release = getattr(engine, "release", "")
    more = (f" --release {release}" if release else "") + (f" --device {device}" if device != "cpu" else "")
    command = f"draftmark judge {engine.name}:{target}{more}"
    arguments = {"engine": engine.name, "target": target, "device": device, "command": command, "limit": limit}
    return Opening(__name__, arguments, engine.environment(target, device))


def open_subject(engine: str, target: str, device: str, command: str, limit: float) -> LayerSubject:
    """Open the backend.

    Raises:
        DraftmarkError: it cannot be opened; the message contains the remedy.
    """
    opened = engines()[engine].open(target, device)
    return LayerSubject(f"{engine}:{target}", opened, device, command, limit)


@dataclass
class LayerUnderTest:
    """A layer for the run of one item; implements `runner.item.UnderTest`."""

    command: str
    lacks: Mapping[Need, str] = field(default_factory=dict)
    minor: int = Opened.minor
    current: object = None
    marks: set[str] = field(default_factory=set)
    unjudged: str = ""
    serves_core: bool = False

    def for_item(self, tier: Tier) -> LayerUnderTest:
        """Return the layer for the next item, with fresh state."""
        return replace(self, current=None, marks=set())

    def admits(self, error: Refused | Unjudged) -> bool:
        """Return True: the judge raises these errors, with the engine's reasons."""
        return True

    def printed(self, text: str) -> None:
        """Ignore the text: engines print."""


class LayerSubject:
    """Holds an open backend of an engine.

    Args:
        name: ``"engine:target"``.
        target: the open backend.
        device: torch device.
        command: command that judges it, for messages.
        limit: seconds for one item.
    """

    def __init__(self, name: str, target: Target, device: str, command: str, limit: float = LIMIT_S) -> None:
        self._name, self._target, self._device, self._limit = name, target, device, limit
        self._tier = Tier.HOST if device_of(device).host else Tier.DEVICE
        self._layer = LayerUnderTest(command, getattr(target, "lacks", {}))
        self._items: dict[str, Item] = {}

    @property
    def opened(self) -> Opened:
        """Facts about the backend: those of the engine, the machine, and the code of the judge."""
        judge = next((one.dist for one in entry_points(group=GROUP, name=self._name.partition(":")[0])), None)
        machine = here(("draftmark", "draftmark-contract", "torch", "triton", *([judge.name] if judge else [])))
        return Opened(
            name=self._name,
            kind=Kind.LAYER,
            command=self._layer.command,
            machine=machine,
            parts=[Part(SUITE, Path(__file__).parents[1])],
            facts=dict(self._target.facts),
        )

    @property
    def left_out(self) -> Mapping[str, str]:
        """Rules that have no item for this backend → the reason."""
        return self._target.left_out

    def items(self) -> Sequence[Listed]:
        """Return the items of the backend, in the tier of its device."""
        self._items = {one.id: one for one in self._target.items()}
        return [Listed.of(one, self._tier) for one in self._items.values()]

    def run(self, item: str) -> Result:
        """Run one item."""
        if not self._items:
            self.items()
        return replace(run_item(self._items[item], self._layer, (), self._limit), tier=self._tier.value)

    def lost(self) -> bool:
        """Return True if the device rejects all further work of this process."""
        if self._tier is Tier.HOST:
            return False
        import torch

        try:
            torch.ones(1, device=self._device).add(1).cpu()
        except RuntimeError:
            return True
        return False
