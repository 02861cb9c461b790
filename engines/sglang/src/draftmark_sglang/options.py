"""What a user chooses beside SGLang's own arguments: environment variables, which SGLang's processes inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from draftmark_engines import EngineError

BACKEND_VARIABLE = "DRAFTMARK_BACKEND"
ANCESTORS_VARIABLE = "DRAFTMARK_ANCESTORS"


class Ancestors(StrEnum):
    """Whose KV a branch of a draft step sees."""

    TRUE = "true"
    """That of the tokens it descends from."""
    BRANCH = "branch"
    """That of the branches of its own number, which is what SGLang's backends read: `select_top_k_tokens` reorders
    hidden states by parent and leaves KV where it was (sglang#8409). For comparison."""


@dataclass(frozen=True)
class Options:
    """Attributes:
    backend: the draftmark backend that serves; None for the default of the device.
    ancestors: whose KV draft branches see.
    """

    backend: str | None = None
    ancestors: Ancestors = Ancestors.TRUE

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """Read the environment.

        Raises:
            EngineError: a variable has a value that it cannot have.
        """
        ancestors = environment.get(ANCESTORS_VARIABLE) or Ancestors.TRUE.value
        if ancestors not in tuple(Ancestors):
            allowed = " or ".join(Ancestors)
            raise EngineError(
                f"{ANCESTORS_VARIABLE} is {ancestors!r}, but it is {allowed}; unset it for true ancestors"
            )
        return cls(environment.get(BACKEND_VARIABLE) or None, Ancestors(ancestors))
