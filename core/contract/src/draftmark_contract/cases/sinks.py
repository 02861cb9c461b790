"""Layers with attention sinks: those of gpt-oss, GQA groups of 1 to 8, and other dtypes, soft caps and windows."""

from __future__ import annotations

from dataclasses import replace

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode

from ..check import Case
from .forward_sets import last_steps
from .forwards import ForwardCase, uniform
from .geometries import PAGE128, SMALL, Shape
from .production import CROWD, CROWD_TREE, TREE, crowd, few_requests

SINCE = (1, 4)
GPT_OSS = AttentionShape(64, 8, 64, 16, sinks=True)
WINDOW = 127
"""Keys to the left of a row: gpt-oss's sliding_window of 128 on every other layer."""
LIMITS = Limits(max_num_reqs=3, max_context_len=200, max_extend_tokens=32, capture_batch_sizes=(1, 2))
LENS = (140, 37)
"""Prefix lengths; the first is longer than the window."""
FEW = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
"""One mode for each way in which kernels finish a softmax sum."""


RANK = AttentionShape(8, 1, 64, 64, sinks=True)
"""Attention of one rank of gpt-oss on eight devices."""
CHAIN = DraftShape(topk=1, num_steps=3, num_draft_tokens=4)


def _made(shape: AttentionShape, draft: DraftShape = TREE) -> Geometry:
    return Geometry.create(replace(shape, sinks=True), LIMITS, draft, modes=CORE_MODES)


def gpt_oss() -> tuple[Geometry, Geometry]:
    """Return gpt-oss's two kinds of layers on one tensor-parallel rank: with a sliding window and without."""
    return _made(replace(RANK, window_left=WINDOW)), _made(RANK)


def shapes() -> list[Shape]:
    """Return gpt-oss's full geometry, other GQA groups, and sinks with other dtypes, caps, scales and page sizes."""
    floats = {"q_dtype": "float32", "kv_dtype": "float32"}
    found = {
        "gpt-oss": GPT_OSS,
        "gpt-oss-window": replace(GPT_OSS, window_left=WINDOW),
        **{f"group{n}": AttentionShape(2 * n, 2, 64, 128) for n in (1, 2, 3, 5)},
        **{f"group{n}": AttentionShape(n, 1, 64, 128) for n in (6, 7)},
        "group4-fp32-cap": replace(SMALL, num_kv_heads=1, logits_soft_cap=5.0, **floats),  # type: ignore[arg-type]
        "group4-kv8": replace(SMALL, num_kv_heads=1, kv_dtype="float8_e4m3fn"),
        "page128-window-cap": replace(PAGE128, window_left=60, logits_soft_cap=20.0),
    }
    chains = Shape("gpt-oss-window-chain", _made(replace(RANK, window_left=WINDOW), CHAIN), SINCE)
    return [*(Shape(name, _made(shape), SINCE) for name, shape in found.items()), chains]


def requests(shape: Shape) -> list[ForwardCase]:
    """Return the forwards of a shape: every mode for gpt-oss's window layer, few modes and short prefixes otherwise."""
    if shape.name == "gpt-oss-window":
        return few_requests(shape.geometry, LENS)
    if shape.geometry.draft == CHAIN:  # Some kernels support a window with chains only, not with trees.
        modes = (Mode.DECODE, Mode.VERIFY, Mode.DRAFT_EXTEND)
        return [uniform(mode.value, shape.geometry, mode, LENS, 3, tree="chain") for mode in modes]
    return [one for one in few_requests(shape.geometry, (70, 5)) if one.mode in FEW]


def far() -> list[Shape]:
    """Return shapes for sinks far from all logits: one per dtype, each with a GQA group, a soft cap and a window."""
    named = {shape.name: shape for shape in shapes()}
    return [named[name] for name in ("group6", "group4-fp32-cap", "page128-window-cap")]


def crowded() -> list[Case]:
    """Return forwards of 24 requests with up to 2,600 keys, in modes in which kernels use split-KV."""
    made = {
        "crowd": (AttentionShape(2, 1, 64, 64, "float32", "float32"), (Mode.DECODE, Mode.VERIFY, Mode.DRAFT)),
        "crowd-window": (AttentionShape(2, 1, 64, 64, "float32", "float32", window_left=1500), (Mode.DECODE,)),
        "crowd-page128": (AttentionShape(2, 1, 128, 128, "float16", "float16"), (Mode.DECODE,)),
    }
    found = []
    for name, (shape, modes) in made.items():
        geometry = Geometry.create(replace(shape, sinks=True), CROWD, CROWD_TREE, modes=CORE_MODES)
        last = last_steps(geometry)
        found += [Shape(name, geometry, SINCE).case(crowd(geometry, mode, last[mode]), mode.value) for mode in modes]
    return found
