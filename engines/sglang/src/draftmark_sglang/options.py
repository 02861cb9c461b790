"""Settings that SGLang's own arguments do not cover: environment variables, which SGLang's processes inherit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from draftmark_engines import EngineError

BACKEND_VARIABLE = "DRAFTMARK_BACKEND"
STATE_VARIABLE = "DRAFTMARK_STATE_BACKEND"
ANCESTORS_VARIABLE = "DRAFTMARK_ANCESTORS"


class Ancestors(StrEnum):
    """Selects the earlier draft tokens that a branch of a draft step attends to: true ancestors, or SGLang's choice."""

    TRUE = "true"
    """Attend to the tokens that the branch descends from."""
    BRANCH = "branch"
    """Attend to the tokens of the same branch number in each step, as SGLang's backends do (sglang#8409).

    `select_top_k_tokens` reorders hidden states by parent but not the KV. This value exists for comparison.
    """


@dataclass(frozen=True)
class Options:
    """Settings that the environment variables give.

    Attributes:
        backend: name of the draftmark backend; None for the device's default.
        ancestors: ancestors that draft branches attend to.
        state_backend: name of the backend for recurrent layers, or ``"sglang"``; None for `backend`.
    """

    backend: str | None = None
    ancestors: Ancestors = Ancestors.TRUE
    state_backend: str | None = None

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> Options:
        """Read the settings from the environment.

        Raises:
            EngineError: DRAFTMARK_ANCESTORS has a value that is not allowed.
        """
        ancestors = environment.get(ANCESTORS_VARIABLE) or Ancestors.TRUE.value
        if ancestors not in tuple(Ancestors):
            allowed = " or ".join(Ancestors)
            raise EngineError(
                f"{ANCESTORS_VARIABLE} is {ancestors!r}, but must be {allowed}; unset it for true ancestors"
            )
        backend, states = (environment.get(name) or None for name in (BACKEND_VARIABLE, STATE_VARIABLE))
        return cls(backend, Ancestors(ancestors), states)
