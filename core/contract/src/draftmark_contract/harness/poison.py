"""Explains a failing value that came from poisoned memory. The suite poisons memory by setting all bits (NaN or -1)."""

from __future__ import annotations

import re

NAN = "NaN: the suite fills memory with NaN. This value was never written, or it was read from KV that no row owns"
INDEX = (
    "-1 has every bit set, like the poison with which the suite fills buffers: "
    "this value was never written, in this step or in the capture"
)


def poison_in(got: object) -> str:
    """Return an explanation of a value that comes from poisoned memory, or "" if the value shows no poison.

    Slots and pages that are computed from a poisoned entry are negative too.
    """
    text = str(got)
    if re.search(r"\bnan\b", text, re.IGNORECASE):
        return NAN
    return INDEX if re.search(r"(?<![\w.])-\d+(?![\w.])", text) else ""
