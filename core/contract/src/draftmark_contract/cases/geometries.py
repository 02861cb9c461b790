"""Geometries of the behaviour checks: few and small, with sizes that differ so that swapped sizes show. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from draftmark.geometry import (
    CORE_MODES,
    DRAFT_MODES,
    TARGET_MODES,
    AttentionShape,
    DraftShape,
    Geometry,
    Limits,
    Mode,
    StateGeometry,
    StateShape,
)

from ..check import Case

LIMITS = Limits(max_num_reqs=6, max_context_len=84, max_extend_tokens=48, capture_batch_sizes=(1, 4, 8))
"""Padding reaches 8 while at most six requests are live (sglang#25124). 84 is a multiple of no page size used here."""
SMALL = AttentionShape(num_qo_heads=4, num_kv_heads=2, head_dim=64, page_size=16)
ONE_KV_HEAD = replace(SMALL, num_qo_heads=2, num_kv_heads=1)
"""Shape of variants that vary the forward and not the heads. An interpreter runs a program for each KV head."""
TREE = DraftShape(topk=3, num_steps=4, num_draft_tokens=6)
"""D is neither S + 1 nor k·(S-1) (sglang#27545)."""
PAGE128 = AttentionShape(4, 2, 128, page_size=128, q_dtype="float16", kv_dtype="float16")
"""Shape for kernels with large pages. float16 makes one key among hundreds visible in an output."""
PAGE128_LIMITS = Limits(max_num_reqs=4, max_context_len=255, max_extend_tokens=160, capture_batch_sizes=(1, 2, 5))
"""At the context limit every tail except DECODE's crosses a page boundary (sglang#22778). The requests are few, because
interpreted kernels are slow for hundreds of keys."""
PAGE128_TREE = DraftShape(topk=3, num_steps=3, num_draft_tokens=5)
FEW_GRAPHS = Limits(max_num_reqs=7, max_context_len=255, max_extend_tokens=160, capture_batch_sizes=(1, 4))
"""More requests may live than the largest graph holds, as in engines that capture up to a limit (sglang#28569)."""
LARGE_PAGES = ("target-page128", "draft-page128")
IN_1_3 = (
    *("all-modes", "all-few-graphs", "all-few-graphs-window", "all-no-graphs"),
    *("all-kv8", "all-fp32", "target-topk1"),
)
"""One geometry with all modes (a target that drafts for itself). Two that run eagerly above their largest graph, one of
them with a window. One that captures nothing. One with quantised KV, and one in float32. One with trees from a drafter
without topk."""
EVERYWHERE = ("small", "target", "draft", *LARGE_PAGES)
"""Shapes that every behaviour check runs, so that each check also tests a backend that serves only large pages."""


@dataclass(frozen=True)
class Shape:
    """Holds a geometry and its name. The ids of its cases start with that name.

    Attributes:
        since: contract (major, minor) that added the shape to the suite.
        brief: True when rows see hundreds of keys. Checks that do not test lengths then run fewer forwards.
    """

    name: str
    geometry: Any
    since: tuple[int, int] = (1, 0)
    brief: bool = False

    def case(self, value: Any, label: str = "") -> Case:
        """Return a case with this value and the id ``"name-label"``, or ``"name"`` if there is no label."""
        return Case(f"{self.name}-{label}" if label else self.name, value, self.since)


def _make(
    attention: AttentionShape = SMALL,
    draft: DraftShape = TREE,
    limits: Limits = LIMITS,
    modes: tuple[Mode, ...] = TARGET_MODES,
) -> Geometry:
    return Geometry.create(attention, limits, draft, modes=modes)


def shapes(*names: str) -> list[Shape]:
    """Return the shapes that every check runs and the shapes named here, in a fixed order."""
    return [shape for shape in all_shapes() if shape.name in (*EVERYWHERE, *names)]


def all_shapes() -> list[Shape]:
    """Return a shape for every geometry of `behaviours`."""
    since = dict.fromkeys(LARGE_PAGES, (1, 2)) | dict.fromkeys(IN_1_3, (1, 3))
    return [
        Shape(name, geometry, since.get(name, (1, 0)), brief=name in (*LARGE_PAGES, *IN_1_3))
        for name, geometry in behaviours().items()
    ]


def behaviours() -> dict[str, Geometry]:
    """Return the geometries of every check except the numerics checks, by name."""

    def windowed(shape: AttentionShape) -> AttentionShape:
        return replace(shape, page_size=8, window_left=5, logits_soft_cap=30.0)

    wide = DraftShape(topk=8, num_steps=6, num_draft_tokens=35)
    # Keep the prefill limit small. With a large one, buffers sized for prefill would also hold the rows of other modes,
    # and a wrong row count in those modes would not show (sglang#27338).
    short = replace(LIMITS, max_extend_tokens=32)
    eager = replace(PAGE128, num_qo_heads=2, num_kv_heads=1)
    return {
        "small": mandatory(),
        "target": _make(),
        "draft": _make(ONE_KV_HEAD, modes=DRAFT_MODES),
        "target-window": _make(windowed(SMALL)),
        "draft-window": _make(windowed(ONE_KV_HEAD), modes=DRAFT_MODES),
        "target-page1-words2": _make(replace(SMALL, page_size=1), wide),
        "draft-page1-words2": _make(replace(ONE_KV_HEAD, page_size=1), wide, modes=DRAFT_MODES),
        "target-overlap": _make(limits=replace(LIMITS, overlap=True)),
        "draft-overlap": _make(ONE_KV_HEAD, limits=replace(LIMITS, overlap=True), modes=DRAFT_MODES),
        "target-page32-long": _make(replace(ONE_KV_HEAD, page_size=32), limits=replace(LIMITS, max_context_len=700)),
        "target-rows-of-verify": _make(ONE_KV_HEAD, DraftShape(topk=2, num_steps=2, num_draft_tokens=7), limits=short),
        "draft-rows-of-topk": _make(
            ONE_KV_HEAD, DraftShape(topk=9, num_steps=3, num_draft_tokens=2), limits=short, modes=DRAFT_MODES
        ),
        "all-fp32": _make(replace(SMALL, q_dtype="float32", kv_dtype="float32", page_size=8), modes=CORE_MODES),
        "target-topk1": _make(draft=DraftShape(topk=1, num_steps=5, num_draft_tokens=6)),
        "draft-chain": _make(ONE_KV_HEAD, DraftShape(topk=1, num_steps=5, num_draft_tokens=3), modes=DRAFT_MODES),
        "target-page128": _make(PAGE128, PAGE128_TREE, PAGE128_LIMITS),
        "draft-page128": _make(PAGE128, PAGE128_TREE, PAGE128_LIMITS, DRAFT_MODES),
        "all-modes": _make(modes=CORE_MODES),
        "all-few-graphs": _make(eager, PAGE128_TREE, FEW_GRAPHS, CORE_MODES),
        "all-kv8": _make(replace(SMALL, kv_dtype="float8_e4m3fn"), modes=CORE_MODES),
        "all-few-graphs-window": _make(replace(eager, window_left=2), PAGE128_TREE, FEW_GRAPHS, CORE_MODES),
        "all-no-graphs": _make(eager, PAGE128_TREE, replace(FEW_GRAPHS, capture_batch_sizes=()), CORE_MODES),
    }


def wide() -> list[Shape]:
    """Return geometries with counts that exceed 8 and 16 bits. Their pools are large, so only metadata is checked."""
    crowd = Limits(max_num_reqs=300, max_context_len=40, max_extend_tokens=4400, capture_batch_sizes=(4, 320))
    long = Limits(max_num_reqs=3, max_context_len=70_000, max_extend_tokens=64, capture_batch_sizes=(1, 4))
    plain = (Mode.EXTEND, Mode.DECODE)
    return [
        Shape("crowd", _make(limits=crowd, draft=DraftShape(), modes=plain)),
        Shape("long", _make(limits=long, draft=DraftShape(), modes=plain)),
        Shape("long-target", _make(limits=long)),
        Shape("crowd-page128", _make(PAGE128, limits=crowd, draft=DraftShape(), modes=plain), (1, 2)),
        Shape("long-target-page128", _make(PAGE128, limits=long), (1, 2)),
        Shape("long-page784", _make(replace(SMALL, page_size=784), limits=long), (1, 3)),
        Shape("long-page48", _make(replace(SMALL, page_size=48), limits=long, modes=DRAFT_MODES), (1, 3)),
    ]


def mandatory() -> Geometry:
    """Return the geometry that no backend may refuse: EXTEND and DECODE, 8/2 heads of 128, pages of 128."""
    attention = AttentionShape(num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=128)
    limits = Limits(max_num_reqs=3, max_context_len=300, max_extend_tokens=64, capture_batch_sizes=(1, 4))
    return Geometry.create(attention, limits, modes=(Mode.EXTEND, Mode.DECODE))


def numerics() -> list[Shape]:
    """Return shapes that vary dtype, head shape, head size, window and soft cap, combined so that few are needed."""
    rows = {
        "bf16-mha-80": (4, 4, 80, "bfloat16", -1, 0.0),
        "bf16-gqa4-128": (8, 2, 128, "bfloat16", -1, 0.0),
        "bf16-gqa8-64-window": (8, 1, 64, "bfloat16", 11, 0.0),
        "bf16-gqa2-256-cap": (4, 2, 256, "bfloat16", -1, 20.0),
        "bf16-gqa8-128-heads16": (16, 2, 128, "bfloat16", 0, 0.0),
        "fp16-gqa4-96": (8, 2, 96, "float16", -1, 0.0),
        "fp16-mqa-128-window-cap": (4, 1, 128, "float16", 19, 50.0),
        "fp16-mha-64": (2, 2, 64, "float16", -1, 0.0),
        "fp32-gqa4-64": (8, 2, 64, "float32", -1, 0.0),
        "fp32-gqa8-128-window": (8, 1, 128, "float32", 11, 0.0),
        "fp32-mqa-80-cap": (4, 1, 80, "float32", -1, 20.0),
        "fp32-gqa3-96-scale": (6, 2, 96, "float32", -1, 0.0),
        "bf16-gqa3-64-heads9": (9, 3, 64, "bfloat16", -1, 0.0),
        "bf16-gqa4-128-kv8": (8, 2, 128, "bfloat16", -1, 0.0),
    }
    made = []
    for name, (heads, kv_heads, dim, dtype, window, cap) in rows.items():
        scale = 0.05 if name.endswith("scale") else None
        stored = "float8_e4m3fn" if name.endswith("kv8") else dtype
        made.append(Shape(name, _make(AttentionShape(heads, kv_heads, dim, 16, dtype, stored, scale, window, cap))))
    large = {
        "bf16-mha-128-page128": AttentionShape(4, 4, 128, 128),
        "bf16-gqa4-128-page128": AttentionShape(8, 2, 128, 128),
        "fp16-gqa8-128-page128-scale": replace(PAGE128, num_qo_heads=8, num_kv_heads=1, softmax_scale=0.05),
    }
    newer = {
        "bf16-gqa3-64-page128-heads9": AttentionShape(9, 3, 64, 128),
        "fp16-mha-64-page128": AttentionShape(4, 4, 64, 128, "float16", "float16"),
        "bf16-gqa8-256-page128": AttentionShape(8, 1, 256, 128),
        "fp16-gqa2-128-page128-small-cap": replace(PAGE128, logits_soft_cap=0.5),
    }
    may_round = AttentionShape(32, 1, 128, 128, kv_dtype="float8_e4m3fn", round_to_e4m3=True)
    rounded = {
        "bf16-gqa32-128-page128-rounded": may_round,
        "bf16-gqa32-64-window-cap-rounded": replace(
            may_round, head_dim=64, page_size=16, window_left=60, logits_soft_cap=20.0
        ),
    }
    since = dict.fromkeys(large, (1, 2)) | dict.fromkeys(newer, (1, 3)) | dict.fromkeys(rounded, (1, 5))
    shapes_of_pages = (large | newer | rounded).items()
    return made + [Shape(name, _make(one, PAGE128_TREE, PAGE128_LIMITS), since[name]) for name, one in shapes_of_pages]


def logits() -> list[Shape]:
    """Return the shapes for checks of large logits, with all modes.

    They contain each dtype, pages of 128, and every pair of a soft cap, a window, fp8 KV with scales, and a GQA group.
    """
    group = replace(SMALL, num_kv_heads=1)
    shapes = {
        "bf16": SMALL,
        "fp32-window": replace(SMALL, q_dtype="float32", kv_dtype="float32", window_left=60),
        "fp16-page128": PAGE128,
        "bf16-cap": replace(SMALL, logits_soft_cap=30.0),
        "fp16-cap-page128": replace(PAGE128, logits_soft_cap=20.0),
        "bf16-kv8": replace(SMALL, kv_dtype="float8_e4m3fn"),
        "bf16-gqa4-window-cap": replace(group, window_left=60, logits_soft_cap=30.0),
        "bf16-gqa4-window-kv8": replace(group, window_left=60, kv_dtype="float8_e4m3fn"),
        "bf16-gqa4-cap-kv8": replace(group, logits_soft_cap=30.0, kv_dtype="float8_e4m3fn"),
        "fp16-gqa4-window-cap-page128": replace(PAGE128, num_kv_heads=1, window_left=60, logits_soft_cap=20.0),
    }
    limits = replace(PAGE128_LIMITS, max_context_len=180, max_extend_tokens=32)
    return [Shape(name, _make(one, PAGE128_TREE, limits, CORE_MODES), (1, 3)) for name, one in shapes.items()]


def _rows(a: AttentionShape) -> str:
    """Return the words about a layer's values for a message; empty if they are apart and as wide as the keys."""
    lists = f"chosen_width={a.chosen_width} " * bool(a.chosen_width)
    return lists + "latent " * a.latent + f"value_dim={a.value_width} " * (a.value_width != a.head_dim)


def describe(geometry: Geometry | StateGeometry) -> str:
    """Return the geometry in one line, for messages."""
    d, limits = geometry.draft, geometry.limits
    if isinstance(geometry, StateGeometry):
        return f"{geometry.num_layers} layers, {_state(geometry.state)} {d} state_interval={limits.state_interval}"
    a = geometry.attention
    return (
        f"{a.num_qo_heads}/{a.num_kv_heads} heads of {a.head_dim} {a.q_dtype} page_size={a.page_size} "
        f"{_rows(a)}window_left={a.window_left} cap={a.logits_soft_cap} scale={a.softmax_scale:.6g}"
        f"{' sinks' * a.sinks}{' round_to_e4m3' * a.round_to_e4m3} "
        f"{'batch_invariant ' * limits.batch_invariant}"
        f"topk={d.topk} num_steps={d.num_steps} num_draft_tokens={d.num_draft_tokens} "
        f"{f'num_modules={d.num_modules} ' * (d.num_modules > 1)}"
        f"max_context_len={limits.max_context_len} overlap={limits.overlap}"
    )


def _state(s: StateShape) -> str:
    heads = f"{s.num_heads}/{s.num_key_heads} heads of {s.value_dim} x {s.key_dim}, gate of each {s.gate.value}, "
    window = f"convolution of {s.conv_kernel} over {s.conv_channels}" if s.conv_kernel else "no convolution"
    dtypes = f"{s.dtype}, state {s.state_dtype}, window {s.conv_dtype}"
    return f"{s.recurrence.value}: {heads if s.num_heads else ''}{window}; {dtypes}"
