"""Items of one step: outputs against float64, rows with slot -1, and inputs in any form and place."""

from __future__ import annotations

from dataclasses import replace

from draftmark.geometry import AttentionShape

from ...cases.forward_sets import extends
from ...cases.forwards import ragged
from ...cases.geometries import logits, numerics
from ...runner.item import Item
from ..driver import EngineCapabilities
from ..step import step_of
from .building import SMALL, case_of, fitted, of_each_mode

MATCH, SERVE, LOGITS = "numerics.match_float64", "numerics.serve_what_is_not_refused", "numerics.survive_any_logits"
PADDING, SLOTS = "padding.changes_no_live_byte", "engine.forms_are_taken_as_they_are"
LENGTHS, REPEATS = "lengths.of_any_kind_give_one_result", "repeats.give_the_same_bits"
VIEWS, ELSEWHERE = "inputs.may_be_views_of_one_projection", "inputs.may_lie_elsewhere_each_time"
PURE = "purity.each_call_writes_its_own"
BEHIND = "rows after the live ones hold NaN and have slot -1: no live row and no KV slot may change"
AMONG = "rows of slot -1 store nothing and still attend, to the KV at their token's slot"
LOOSE = "the host's lengths are upper bounds, as in asynchronous steps with drafts"
OWN_SLOTS = "only its own slots of KV change"


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return the items of all modes, dtypes, shapes, paddings and inputs."""
    return [*_shapes(caps), *_unstored(caps), *_inputs(caps)]


def _shapes(caps: EngineCapabilities) -> list[Item]:
    """Return items for every shape in every mode, for windows near page boundaries, and for small and large logits."""
    found = []
    for shape in numerics():
        for forward in of_each_mode(fitted(caps, shape.geometry.attention)):
            found.append(case_of(caps, MATCH, f"{shape.name}-{forward.name}", step_of(forward, caps.trees)))
    for name, attention in _odd(caps).items():
        steps = [step_of(forward, caps.trees) for forward in of_each_mode(fitted(caps, attention))]
        found.append(case_of(caps, SERVE, name, steps))
    for shape in logits():
        for forward in of_each_mode(fitted(caps, shape.geometry.attention), (40, 133)):
            found.append(case_of(caps, LOGITS, f"{shape.name}-{forward.name}", step_of(forward, caps.trees)))
    return found


def _odd(caps: EngineCapabilities) -> dict[str, AttentionShape]:
    """Return shapes with windows near page boundaries, small and large caps, scales, page sizes and head counts."""
    size = caps.fit(SMALL).page_size
    windows = (0, 1, size - 1, size, size + 1, 127, 128, 1000)
    found = {f"window{n}": replace(SMALL, window_left=n) for n in windows}
    found |= {f"window{n}-page128": replace(SMALL, window_left=n, page_size=128) for n in (63, 128)}
    found |= {f"cap{cap:g}": replace(SMALL, logits_soft_cap=cap) for cap in (0.5, 30.0)}
    found["window11-cap5"] = replace(SMALL, window_left=11, logits_soft_cap=5.0)
    found |= {f"scale{scale:g}": replace(SMALL, softmax_scale=scale) for scale in (0.01, 1.0)}
    found |= {f"page{n}": replace(SMALL, page_size=n) for n in (32, 48, 64, 256)}
    found |= {f"head{n}": replace(SMALL, head_dim=n) for n in (32, 80, 112, 192, 256)}
    found |= {f"heads{h}-{kv}": replace(SMALL, num_qo_heads=h, num_kv_heads=kv) for h, kv in ((1, 1), (12, 1), (14, 2))}
    eight = replace(SMALL, q_dtype="float16", kv_dtype="float8_e4m3fn")
    return found | {"kv8": eight, "kv8-window": replace(eight, window_left=19), "kv8-128": replace(eight, head_dim=128)}


def _unstored(caps: EngineCapabilities) -> list[Item]:
    """Return items with padding rows after the live rows, and with live rows that are already stored."""
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
                found.append(case_of(caps, PADDING, case, replace(step, surplus=surplus), BEHIND))
            rows = forward.rows
            # Leave the first row and a later row unstored: a kernel that misreads -1 writes slot 0 or the last slot.
            some = replace(step, unstored=frozenset((rows[0], rows[len(rows) // 2])))
            found.append(case_of(caps, SLOTS, f"{name}-{forward.name}", some, AMONG))
        all_of_one = ragged("prefill", geometry, (40, 7), (6, 5), seed=6)
        none = replace(step_of(all_of_one), unstored=frozenset(row for row in all_of_one.rows if row[0] == 0))
        found.append(case_of(caps, SLOTS, f"{name}-whole-request", none, AMONG))
    return found


def _inputs(caps: EngineCapabilities) -> list[Item]:
    """Return items with upper bounds as host lengths, strided views, changed addresses and repeated runs."""
    found = []
    for name, shape in {"fp32": SMALL, "window": replace(SMALL, window_left=19)}.items():
        for forward in of_each_mode(fitted(caps, shape), (40, 0, 133)):
            step = step_of(forward, caps.trees)
            found.append(case_of(caps, LENGTHS, f"{name}-{forward.name}", step, LOOSE))
    geometry = fitted(caps, SMALL)
    for forward in of_each_mode(geometry, (40, 0, 133)):
        step = step_of(forward, caps.trees)
        found.append(case_of(caps, REPEATS, forward.name, [step]))
        for rule in (VIEWS, ELSEWHERE):  # Both check two forms or places, one in each step.
            found.append(case_of(caps, rule, forward.name, [step, step]))
    for forward in extends(geometry):
        found.append(case_of(caps, PURE, forward.name, step_of(forward), OWN_SLOTS))
    return found
