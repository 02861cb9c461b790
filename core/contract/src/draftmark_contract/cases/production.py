"""Forwards with the sizes of real models: head shapes, dozens of requests, thousands of keys, large draft trees.

Each geometry has one large size and keeps the others small, so that an interpreter can run it on a laptop. `full_size`
makes all sizes large at once, for a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode

from .forward_sets import programs
from .forwards import ForwardCase, ragged, uniform
from .geometries import Shape

SINCE = (1, 3)
HEADS = (
    *((32, 8, 128), (28, 4, 128), (40, 8, 128), (64, 8, 64), (64, 4, 128), (16, 1, 256)),
    *((4, 4, 64), (4, 2, 128), (6, 2, 128), (6, 1, 64), (7, 1, 128), (9, 1, 64), (10, 1, 128), (11, 1, 64)),
    *((12, 1, 128), (13, 1, 64), (14, 1, 128), (15, 1, 64)),
)
"""Query heads, KV heads and head size: the shapes of models, and every group size from 1 to 16."""
TREE = DraftShape(topk=2, num_steps=3, num_draft_tokens=3)
CROWD = Limits(max_num_reqs=24, max_context_len=2600, max_extend_tokens=320, capture_batch_sizes=(1, 10))
CROWD_TREE = DraftShape(topk=3, num_steps=3, num_draft_tokens=5)
PREFIXES = (
    2600,
    1024,
    1023,
    2049,
    257,
    513,
    0,
    1,
    1500,
    255,
    300,
    64,
    128,
    90,
    33,
    511,
    20,
    150,
    47,
    7,
    96,
    2,
    129,
    63,
)
"""Prefixes of 24 requests: the context limit, both sides of powers of two, and many short ones."""


def heads() -> list[Shape]:
    """Return one geometry for every head shape of real models, each with all modes."""
    limits = Limits(max_num_reqs=3, max_context_len=200, max_extend_tokens=32, capture_batch_sizes=(1,))
    shapes = {(h, kv, dim): AttentionShape(h, kv, dim, 128) for h, kv, dim in HEADS}
    return [
        Shape(f"h{h}kv{kv}-{dim}", Geometry.create(shape, limits, TREE, modes=CORE_MODES), SINCE)
        for (h, kv, dim), shape in shapes.items()
    ]


def few_requests(geometry: Geometry, lens: tuple[int, int] = (140, 37)) -> list[ForwardCase]:
    """Return one forward per mode at its last draft step, with two live and one padded request, and a prefill."""
    last = dict(programs(geometry))
    found = [uniform(mode.value, geometry, mode, lens, 3, step=step) for mode, step in last.items()]
    return [*found, ragged("extend", geometry, (lens[1], 0), (3, 5), padded=1)]


def crowds() -> list[Shape]:
    """Return geometries for batches of 24 requests with thousands of keys each, with few heads."""
    shapes = {
        "crowd": AttentionShape(2, 1, 64, 64, "float32", "float32"),
        "crowd-window": AttentionShape(2, 1, 64, 32, "float32", "float32", window_left=1500),
        "crowd-page128": AttentionShape(4, 1, 128, 128, "float16", "float16"),
        "crowd-page784": AttentionShape(2, 1, 64, 784, "float32", "float32"),
        "crowd-bf16": AttentionShape(2, 1, 128, 64, "bfloat16", "bfloat16", window_left=1201),
    }
    return [
        Shape(name, Geometry.create(shape, CROWD, CROWD_TREE, modes=CORE_MODES), SINCE)
        for name, shape in shapes.items()
    ]


def crowd(geometry: Geometry, mode: Mode, step: int) -> ForwardCase:
    """Return one forward with all 24 requests, more than the largest captured graph holds."""
    if mode is Mode.EXTEND:
        rows = [1, 40, 3, 100, 17, 1, 64, 5, *(1 + n % 4 for n in range(16))]
        prefixes = [n - 1 if n == CROWD.max_context_len else n for n in PREFIXES]
        return ragged("crowd-extend", geometry, prefixes, rows, seed=2)
    return uniform(f"crowd-{mode.value}", geometry, mode, PREFIXES, len(PREFIXES), step=step, tree="deep", seed=2)


def common_prefix(geometry: Geometry, mode: Mode, step: int) -> ForwardCase:
    """Return a forward of ten requests that share the pages of a system prompt with at most 1,024 tokens."""
    shared, pages = (1024 + 64, 1024, 1300, 2000, 1100, 1025, 1200, 1111, 1999, 2500), 1024
    if mode is Mode.EXTEND:
        found = ragged("common-extend", geometry, shared, [1 + 7 * n % 9 for n in range(len(shared))], seed=5)
    else:
        found = uniform(f"common-{mode.value}", geometry, mode, shared, len(shared), step=step, seed=5)
    return found.with_common_pages(pages // geometry.attention.page_size)


def mostly_padding(geometry: Geometry, mode: Mode, step: int) -> ForwardCase:
    """Return a forward with two live requests among 24, one of them long."""
    if mode is Mode.EXTEND:
        return ragged("padded-extend", geometry, (2500, 3), (7, 30), padded=22, seed=4)
    return uniform(f"padded-{mode.value}", geometry, mode, (2600, 300), 24, step=step, seed=4)


def _shapes(named: Mapping[str, AttentionShape], limits: Limits, draft: DraftShape) -> list[Shape]:
    """Return a shape for each named attention shape, in every core mode, with these limits and this draft shape."""
    return [Shape(name, Geometry.create(one, limits, draft, modes=CORE_MODES), SINCE) for name, one in named.items()]


def wide_tails() -> list[Shape]:
    """Return geometries with trees of 130 nodes and drafts of 72 slots: masks of five words a row (TRT-LLM#13006)."""
    draft = DraftShape(topk=8, num_steps=10, num_draft_tokens=130)
    limits = Limits(max_num_reqs=2, max_context_len=150, max_extend_tokens=16, capture_batch_sizes=(2,))
    shapes = {
        "words5": AttentionShape(2, 1, 64, 16, "float32", "float32"),
        "words5-page128": AttentionShape(4, 2, 128, 128, "float16", "float16"),
    }
    return _shapes(shapes, limits, draft)


def wide(geometry: Geometry) -> list[ForwardCase]:
    """Return one forward per mode at its last draft step; VERIFY has one for every kind of tree."""
    last = {mode: step for mode, step in dict(programs(geometry)).items() if mode is not Mode.DECODE}
    kinds: dict[Mode, Sequence[str]] = {Mode.VERIFY: ("random", "deep", "star")}
    return [
        uniform(f"{mode.value}-{tree}", geometry, mode, (121, 5), 2, step=step, tree=tree)
        for mode, step in last.items()
        for tree in kinds.get(mode, ("random",))
    ]


def wide_crowds() -> list[Shape]:
    """Return geometries of a dozen requests with masks of two words a row, for faults that smaller batches miss."""
    draft = DraftShape(topk=8, num_steps=6, num_draft_tokens=35)
    limits = Limits(max_num_reqs=12, max_context_len=60, max_extend_tokens=16, capture_batch_sizes=(2,))
    shapes = {
        "words2-crowd": AttentionShape(2, 1, 64, 16, "float32", "float32"),
        "words2-crowd-page128": AttentionShape(2, 1, 128, 128, "float16", "float16"),
    }
    return _shapes(shapes, limits, draft)


def wide_crowd(geometry: Geometry) -> list[ForwardCase]:
    """Return a VERIFY and the last DRAFT step of a dozen requests, each with its own tree."""
    lens, last = [7 * n % 60 for n in range(12)], dict(programs(geometry))
    return [
        uniform(f"{mode.value}-crowd", geometry, mode, lens, 12, step=last[mode], seed=3)
        for mode in (Mode.VERIFY, Mode.DRAFT)
    ]


def many_columns() -> list[Shape]:
    """Return geometries with very wide page tables: pages of one token, and pages of 16 tokens."""
    tokens, pages = AttentionShape(2, 1, 64, 1, "float32", "float32"), AttentionShape(2, 1, 64, 16)
    sizes = {"columns4100-page1": (tokens, 4100), "columns530-page16": (pages, 8480)}
    return [
        Shape(name, Geometry.create(one, Limits(2, most, 16, (1,)), TREE, modes=CORE_MODES), SINCE)
        for name, (one, most) in sizes.items()
    ]


def columns(geometry: Geometry) -> list[ForwardCase]:
    """Return forwards with one request near the context limit and a short one; fewer modes for pages of 16."""
    most, few = geometry.limits.max_context_len, (Mode.DECODE, Mode.VERIFY)
    last = {m: step for m, step in dict(programs(geometry)).items() if geometry.attention.page_size == 1 or m in few}
    found = [uniform(f"{mode.value}-columns", geometry, mode, (most, 9), 2, step=step) for mode, step in last.items()]
    return [*found, ragged("extend-columns", geometry, (most - 5, 9), (5, 3))]


def thousands_of_rows() -> list[Shape]:
    """Return a geometry for a prefill of 8,256 rows. A float16 counter skips integers above 2,048."""
    limits = Limits(max_num_reqs=96, max_context_len=128, max_extend_tokens=8300, capture_batch_sizes=(1,))
    geometry = Geometry.create(AttentionShape(1, 1, 64, 16), limits, modes=(Mode.EXTEND, Mode.DECODE))
    return [Shape("rows8256", geometry, (1, 5))]


def long_prefill(geometry: Geometry) -> list[ForwardCase]:
    """Return a prefill of 96 requests with 85 to 87 rows each.

    In float16, row offsets above 2,048 can only be even, those above 4,096 only multiples of four, and so on.
    """
    rows_of = [85 + n % 3 for n in range(96)]
    return [ragged("rows8256-extend", geometry, [n % 8 for n in range(96)], rows_of, seed=1)]


def many_rows() -> list[Shape]:
    """Return geometries with more than 65,535 (row, head) pairs, the limit of one dimension of a CUDA launch grid."""
    limits = Limits(max_num_reqs=24, max_context_len=100, max_extend_tokens=540, capture_batch_sizes=(1,))
    shapes = {
        "rows": AttentionShape(128, 8, 64, 16, "float32", "float32"),
        "rows-page128": AttentionShape(128, 8, 128, 128, "float16", "float16"),
    }
    draft = DraftShape(topk=2, num_steps=2, num_draft_tokens=23)
    return _shapes(shapes, limits, draft)


def rows(geometry: Geometry) -> list[ForwardCase]:
    """Return a prefill of 530 rows, and a VERIFY of 24 trees with 23 nodes each."""
    prefill = ragged("rows-extend", geometry, [3 * n for n in range(10)], [53] * 10, seed=1)
    return [prefill, uniform("rows-verify", geometry, Mode.VERIFY, [n for n in range(24)], 24, seed=2)]


FULL = (
    *((32, 8, 128, 0), (28, 4, 128, 0), (40, 8, 128, 0), (64, 8, 64, 0), (64, 4, 128, 4095)),
    *((16, 1, 256, 0), (48, 8, 128, 0), (8, 1, 128, 1023)),
)
"""Query heads, KV heads, head size, and the window or 0."""
FULL_WITH_SINKS = {"full-gpt-oss": -1, "full-gpt-oss-window": 127}
"""Windows of gpt-oss's two kinds of layers."""


def full_size() -> list[Shape]:
    """Return geometries in which every size is large: 33 requests, contexts of 8,192, bfloat16, pages of 64 and 128."""
    limits = Limits(max_num_reqs=33, max_context_len=8192, max_extend_tokens=2048, capture_batch_sizes=(1, 8))
    found = []
    for number, (h, kv, dim, window) in enumerate(FULL):
        shape = AttentionShape(h, kv, dim, (64, 128)[number % 2], window_left=window or -1)
        geometry = Geometry.create(shape, limits, DraftShape(4, 4, 8), modes=CORE_MODES)
        found.append(Shape(f"full-h{h}kv{kv}-{dim}{'-window' if window else ''}", geometry, SINCE))
    for name, left in FULL_WITH_SINKS.items():
        shape = AttentionShape(64, 8, 64, 64, window_left=left, sinks=True)
        found.append(Shape(name, Geometry.create(shape, limits, DraftShape(4, 4, 8), modes=CORE_MODES), (1, 4)))
    return found


def full(geometry: Geometry, mode: Mode, step: int) -> ForwardCase:
    """Return a forward of 33 requests, each with 0 to 8,192 committed tokens."""
    lens = [8192 - n * 255 for n in range(32)] + [0]
    if mode is Mode.EXTEND:
        rows = [500, 1, 900, 64, 3, *(1 + n % 20 for n in range(28))]
        return ragged("full-extend", geometry, [max(0, n - 900) for n in lens], rows, seed=3)
    return uniform(f"full-{mode.value}", geometry, mode, lens, 33, step=step, tree="deep", seed=3)
