"""Metadata, decoded from the declared layout, against brute force from the token history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..check import Case
from ..scenarios.scenes import scenes
from ..scenarios.shapes import behaviours
from ..scenarios.tiers import behaviour
from ..scenarios.turns import Turn

if TYPE_CHECKING:
    from ..subject import Subject

HIGH_SLOT = 2**31
"""Slots from here on do not fit int32."""


def _turns() -> list[Case]:
    return [Case(f"{name}-{turn.name}", turn) for name, geometry in behaviours().items() for turn in scenes(geometry)]


def _high() -> list[Case]:
    found = []
    for name, geometry in behaviours().items():
        size = geometry.attention.page_size
        if size > 1:
            turns = scenes(geometry, first_page=HIGH_SLOT // size + 7)
            found += [
                Case(f"{name}-{turn.name}", turn) for turn in turns if "edges" in turn.name or "ragged" in turn.name
            ]
    return found


@behaviour(cases=_turns, bugs=("sglang#27545", "sglang#26628", "sglang#38187", "sglang#15469", "vllm#19321"))
def decodes_to_the_token_history(subject: Subject, turn: Turn) -> None:
    """The backend's buffers name exactly the KV slots that each row sees and writes."""
    from ..scenarios import verify
    from ..scenarios.rig import Rig, place

    rig = Rig(subject, turn.geometry, 1)
    turn = place(rig, turn)
    batch = rig.stage.set(turn, rig.host)
    rig.prepare(batch)
    verify.padding(turn, verify.metadata(rig, turn, batch))
    verify.guards(rig, turn)


@behaviour(cases=_high, bugs=("vllm#47671", "flashinfer#3136"))
def survives_high_page_ids(subject: Subject, turn: Turn) -> None:
    """Page ids whose slots pass 2**31 reach the metadata unharmed. No such pool is allocated."""
    decodes_to_the_token_history(subject, turn)
