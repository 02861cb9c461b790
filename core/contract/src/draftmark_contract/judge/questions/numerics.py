"""Items that compare outputs with float64 and KV slots with the oracle, over dtypes, head shapes, windows and caps."""

from __future__ import annotations

from dataclasses import replace

from draftmark.geometry import AttentionShape, Geometry, Mode

from ...cases.contents import Contents
from ...cases.forwards import ForwardCase, ragged, uniform
from ...cases.geometries import logits, numerics
from ...runner.item import Item
from ..driver import EngineCapabilities
from ..step import Step, step_of
from .building import fitted, runs

MATCH, SERVE, LOGITS = "numerics.match_float64", "numerics.serve_what_is_not_refused", "numerics.survive_any_logits"
SMALL = AttentionShape(4, 2, 64, page_size=16, q_dtype="float32", kv_dtype="float32")
"""Float32 shape, so that one wrong key in a hundred is visible in the output."""


def questions(caps: EngineCapabilities) -> list[Item]:
    """Return items for every shape in every mode, for windows near page boundaries, and for small and large logits."""
    found = []
    for shape in numerics():
        geometry = fitted(caps, shape.geometry.attention)
        for forward in of_each_mode(geometry):
            found.append(_match(caps, shape.name, step_of(forward, caps.trees)))
    for name, attention in _odd(caps).items():
        geometry = fitted(caps, attention)
        steps = [step_of(forward, caps.trees) for forward in of_each_mode(geometry)]
        found.append(runs(caps, SERVE, name, steps))
    for shape in logits():
        geometry = fitted(caps, shape.geometry.attention)
        for forward in of_each_mode(geometry, (40, 133)):
            case = f"{shape.name}-{forward.name}"
            kinds = (Contents.LARGE, Contents.NEEDLES, Contents.LEVELS)
            found.append(runs(caps, LOGITS, case, [step_of(forward, caps.trees)], kinds))
    return found


def of_each_mode(geometry: Geometry, lens: tuple[int, ...] = (0, 129, 250)) -> list[ForwardCase]:
    """Return forwards: decodes, verifies, a chunked prefill, and a step that mixes prefill, decodes and verifies."""
    found = []
    size = geometry.attention.page_size
    if Mode.DECODE in geometry.modes:
        found.append(uniform("decode", geometry, Mode.DECODE, lens, len(lens)))
    if Mode.VERIFY in geometry.modes:
        found.append(uniform("verify", geometry, Mode.VERIFY, lens, len(lens)))
    if Mode.EXTEND in geometry.modes:
        found.append(ragged("prefill", geometry, (0, 0), (min(size + 3, 50), 7), seed=1))
        found.append(ragged("chunk", geometry, (size + 1, size - 9, 3), (17, 33, 1), seed=2))
        found.append(ragged("mixed", geometry, (size, 131, 1, 0, 17), (1, 1, 5, 20, 5), seed=3))
    return found


def _match(caps: EngineCapabilities, shape: str, step: Step) -> Item:
    return runs(caps, MATCH, f"{shape}-{step.forward.name}", [step], (Contents.FLAT, Contents.SPREAD))


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
