"""What a user says in vLLM's own configuration: --additional-config '{"draftmark": {"backend": "cuda_triton"}}'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from draftmark_engines import EngineError


@dataclass(frozen=True)
class Settings:
    """The adapter's settings.

    Attributes:
        backend: the draftmark backend that serves; None for the default of the device.
        debug: check every step: each batch against its geometry, vLLM's KV slots against those that draftmark derives,
            and the ranks against each other. It waits for the device.
        branches: of a tree of drafts, where the worker is one of `trees`.
    """

    backend: str | None = None
    debug: bool = False
    branches: int = 2

    @classmethod
    def read(cls, additional_config: object) -> Settings:
        """Read them from vLLM's `additional_config`.

        Raises:
            EngineError: an unknown name or a value of another type.
        """
        given = additional_config.get("draftmark", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise EngineError(f"additional_config has draftmark = {given!r}, but it is a table; write {cls._example()}")
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise EngineError(f"additional_config has draftmark.{name}, but there are {', '.join(known)} only")
        if not isinstance(given.get("debug", False), bool):
            raise EngineError(f"additional_config has draftmark.debug = {given['debug']!r}, but it is true or false")
        branches = given.get("branches", 2)
        if not isinstance(branches, int) or isinstance(branches, bool) or branches < 2:
            raise EngineError(f"additional_config has draftmark.branches = {branches!r}, but a tree has 2 or more")
        return cls(**given)  # the backend's name is judged where it is looked up

    @staticmethod
    def _example() -> str:
        return '{"draftmark": {"backend": "cuda_triton"}}'
