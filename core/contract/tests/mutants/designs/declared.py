"""Parts that several mutants share: declared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

from draftmark import Geometry, Mode
from draftmark_contract.layouts import MetadataSpec

CALLS = count()
Declared = dict[Mode, MetadataSpec]


def levels(**fields: Any) -> dict[str, Any]:
    def change(geometry: Geometry, found: Declared) -> Declared:
        return {m: replace(s, levels=tuple(replace(x, **fields) for x in s.levels)) for m, s in found.items()}

    return {"layouts": change}


def graph_states(change: Callable[[Any], None]) -> dict[str, Any]:
    return {"graph_state": lambda g, state: (change(state), state)[1]}
