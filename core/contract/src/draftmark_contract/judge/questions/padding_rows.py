"""Items with rows that have slot -1: padding rows after the live rows, and live rows that are already stored."""

from __future__ import annotations

from dataclasses import replace

from ...cases.forwards import ragged
from ...runner.item import Item
from ..driver import EngineCapabilities
from ..step import step_of
from .building import fitted, runs
from .numerics import SMALL, of_each_mode

PADDING, SLOTS = "padding.changes_no_live_byte", "engine.forms_are_taken_as_they_are"
BEHIND = "rows after the live ones hold NaN and have slot -1: no live row and no KV slot may change"
AMONG = "rows of slot -1 store nothing and still attend, to the KV at their token's slot"


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return the items with unstored rows for every mode, in float32, in bfloat16 and with fp8 KV."""
    found = []
    shapes = {
        "fp32": SMALL,
        "bf16": replace(SMALL, q_dtype="bfloat16", kv_dtype="bfloat16"),
        "page128": replace(SMALL, page_size=128),
    }
    shapes["kv8"] = replace(SMALL, q_dtype="float16", kv_dtype="float8_e4m3fn")
    for name, shape in shapes.items():
        geometry = fitted(caps, shape)
        for forward in of_each_mode(geometry, (40, 0, 133)):
            step = step_of(forward, caps.trees)
            for surplus in (1, 37):
                case = f"{name}-{forward.name}-surplus{surplus}"
                found.append(runs(caps, PADDING, case, [replace(step, surplus=surplus)], asks=BEHIND))
            rows = forward.rows
            # Leave the first row and a later row unstored: a kernel that misreads -1 writes slot 0 or the last slot.
            some = replace(step, unstored=frozenset((rows[0], rows[len(rows) // 2])))
            found.append(runs(caps, SLOTS, f"{name}-{forward.name}", [some], asks=AMONG))
        all_of_one = ragged("prefill", geometry, (40, 7), (6, 5), seed=6)
        none = replace(step_of(all_of_one), unstored=frozenset(row for row in all_of_one.rows if row[0] == 0))
        found.append(runs(caps, SLOTS, f"{name}-whole-request", [none], asks=AMONG))
    return found
