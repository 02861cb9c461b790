"""What poison means where a failure shows it: the suite fills memory with ones before a step, NaN or -1 by dtype."""

from __future__ import annotations

import re

NAN = "NaN: the suite filled this memory with it; nobody has written it since, or it was read from KV that is no row's"
INDEX = (
    "-1 is every bit set, with which the suite fills buffers: nobody wrote this since, in this step or in the capture"
)


def poison_in(got: object) -> str:
    """What a value means that was read from memory the suite poisons; empty where it shows no poison.

    Slots and pages computed from a poisoned entry are negative too.
    """
    text = str(got)
    if re.search(r"\bnan\b", text, re.IGNORECASE):
        return NAN
    return INDEX if re.search(r"(?<![\w.])-\d+(?![\w.])", text) else ""
