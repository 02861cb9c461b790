"""User settings in vLLM's configuration: --additional-config '{"draftmark": {"backend": "cuda_triton"}}'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from draftmark_engines import EngineError


@dataclass(frozen=True)
class Settings:
    """Holds the user's settings of draftmark inside vLLM.

    Attributes:
        backend: name of the draftmark backend; None for the device's default.
        debug: check every step: each batch against its geometry, vLLM's KV slots against derived slots, and the ranks
            against each other. These checks wait for the device.
        branches: branches of a draft tree, for the workers of `trees`.
    """

    backend: str | None = None
    debug: bool = False
    branches: int = 2

    @classmethod
    def read(cls, additional_config: object) -> Settings:
        """Read the settings from vLLM's `additional_config`.

        Raises:
            EngineError: an unknown name, or a value of a wrong type.
        """
        given = additional_config.get("draftmark", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise EngineError(f"additional_config has draftmark = {given!r}, not a table; write {cls._example()}")
        known = [one.name for one in fields(cls)]
        for name in given:
            if name not in known:
                raise EngineError(f"additional_config has draftmark.{name}, which is unknown; use {', '.join(known)}")
        if not isinstance(given.get("debug", False), bool):
            raise EngineError(f"additional_config has draftmark.debug = {given['debug']!r}; write true or false")
        branches = given.get("branches", 2)
        if not isinstance(branches, int) or isinstance(branches, bool) or branches < 2:
            raise EngineError(f"additional_config has draftmark.branches = {branches!r}; write an integer of 2 or more")
        return cls(**given)  # the backend's name is checked later, by `choose`

    @staticmethod
    def _example() -> str:
        return '{"draftmark": {"backend": "cuda_triton"}}'
