"""Stand-ins for objects of a running server that SGLang's backends read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from draftmark_contract.check import Unjudged


class Missing(Unjudged, AttributeError):
    """A release reads an attribute that the stand-in does not have. `getattr` with a default still works."""


class StandIn(SimpleNamespace):
    """Object with these attributes; any other attribute ends the item as `Unjudged`."""

    def __getattr__(self, name: str) -> Any:
        raise Missing(f"this release reads {name!r}, which the judge does not set")


class Off:
    """Group of options of a server, all of them off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Off()

    def __bool__(self) -> bool:
        return False

    def __call__(self, *arguments: Any) -> Off:
        """Return an option that is off, as a method of the server's arguments does."""
        return Off()


class Options(Off):
    """Options of a server. Those that are not given are off."""

    def __init__(self, **given: Any) -> None:
        vars(self).update(given)
