"""Geometries that every backend is tested on: edge values of draft shape, page size, limits and overlap.

They avoid the special values that hide sizing bugs. So topk > 1, page_size > 1, num_draft_tokens != num_steps + 1, and
a captured batch is larger than max_num_reqs. Contexts end one token before, at, and one token after a page boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from draftmark.geometry import CORE_MODES, DRAFT_MODES, TARGET_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode

from ..check import Case
from ..profiles import MANDATORY

TOPK = (1, 2, 4, 8)
STEPS = (1, 2, 3, 5, 9)
DRAFT_TOKENS = (1, 2, 7, 33, 64)
PAGES = (1, 2, 16, 64, 128)
PLAIN_MODES = (Mode.EXTEND, Mode.DECODE)
SERVED = {"target": TARGET_MODES, "draft": DRAFT_MODES, "plain": PLAIN_MODES, "all": CORE_MODES}
"""Sets of modes. "plain" is the mandatory profile, the only one of a backend without speculation; "all" is a target
that drafts for itself."""
IN_1_3 = "all"
PROVED = {name: modes for name, modes in SERVED.items() if name != IN_1_3}
"""Sets of modes that proofs cover. "all" is covered by the sweep only: plugins' tilings branch too often there."""


def since(served: str) -> tuple[int, int]:
    """Return the contract (major, minor) in which the suite first had geometries with these modes."""
    return (1, 3) if served == IN_1_3 else (1, 0)


LATENT = AttentionShape(8, 1, 576, 64, softmax_scale=192**-0.5, value_dim=512, latent=True)
"""The latent layer of DeepSeek V3 at 16 ranks, and of Kimi K2 at 8."""


@dataclass(frozen=True)
class Family:
    """Geometries that share modes, page size, overlap and topk. Iterating varies the draft shape and the limits.

    Half of the combinations of steps, draft tokens and limits occur, so that each two values still meet. The other half
    occurs in the family with the other overlap.
    """

    modes: tuple[Mode, ...]
    page_size: int
    overlap: bool
    topk: int

    def __iter__(self) -> Iterator[Geometry]:
        page = self.page_size
        plain = self.modes == PLAIN_MODES
        shapes = [(1, 1)] if plain else product(STEPS, DRAFT_TOKENS)
        for (i, (steps, drafts)), (j, (context, limits)) in product(enumerate(shapes), enumerate(walls(page))):
            if not plain and (i + j + self.overlap) % 2:
                continue
            reqs, extend, capture = limits
            yield Geometry.create(
                AttentionShape(8, 2, 128, page),
                Limits(reqs, context, extend, capture, self.overlap),
                DraftShape(self.topk, steps, drafts),
                modes=self.modes,
            )


LIMITS = ((1, 1, ()), (5, 2048, (1, 2, 4, 8)), (33, 40, (32,)))
"""(max_num_reqs, max_extend_tokens, capture_batch_sizes); the largest captured batch may exceed max_num_reqs."""


def walls(page: int) -> list[tuple[int, tuple[int, int, tuple[int, ...]]]]:
    """Return context lengths around a page boundary and one long length, each paired with two of `LIMITS`."""
    contexts = (1, page, 4 * page - 1, 4096 + page // 2 + 1)
    return [(max(1, context), LIMITS[(i + j) % len(LIMITS)]) for i, context in enumerate(contexts) for j in (0, 1)]


def families() -> Sequence[Case]:
    """Return a family for every combination of modes, page size, overlap and topk, each as one case."""
    found = [
        (name, f"{name}-p{page}-k{k}{'-overlap' if overlap else ''}", Family(modes, page, overlap, k))
        for (name, modes), page, overlap, k in product(SERVED.items(), PAGES, (False, True), TOPK)
        if k in {PLAIN_MODES: (1,), CORE_MODES: (2, 8)}.get(modes, TOPK)
    ]
    return [Case(label, family, since(name), next(iter(family))) for name, label, family in found]


def mandatory() -> Geometry:
    """Return the geometry that every backend must serve."""
    return Geometry.create(MANDATORY, Limits(8, 4096, 512, (1, 2, 4, 8)), modes=PLAIN_MODES)


def standing_for(modes: tuple[Mode, ...], overlap: bool = False, latent: bool = False) -> Geometry:
    """Return the mandatory geometry with other modes, or a latent one.

    It represents cases that draw all other values at random.
    """
    shape = LATENT if latent else MANDATORY
    return Geometry.create(shape, Limits(8, 4096, 512, (1, 2, 4, 8), overlap), modes=modes)


def tight_geometries() -> Sequence[Case]:
    """Return geometries as large as engines use. At that size rounding does not hide a wrong factor."""
    shapes = {"d1": DraftShape(), "tree": DraftShape(4, 3, 8), "wide": DraftShape(8, 5, 64)}
    return [
        Case(
            f"{served}-p{page}-{name}{'-overlap' if overlap else ''}",
            Geometry.create(
                AttentionShape(8, 2, 128, page), Limits(256, 131075, 8192, (8, 128, 256), overlap), draft, modes=modes
            ),
            since(served),
        )
        for (served, modes), page, (name, draft), overlap in product(
            SERVED.items(), (1, 16, 64, 128), shapes.items(), (False, True)
        )
        if name == "d1" or modes != PLAIN_MODES
    ]


def huge_geometries() -> Sequence[Case]:
    """Return geometries with page ids, slots and sums of more than 2**31."""
    sizes = {"many": (8192, 1 << 20), "long": (4, 1 << 30), "both": (65536, 1 << 21)}
    return [
        Case(
            f"{served}-p{page}-{name}",
            Geometry.create(
                AttentionShape(8, 2, 128, page),
                Limits(reqs, context, 8192, (reqs,)),
                DraftShape() if modes == PLAIN_MODES else DraftShape(4, 3, 8),
                modes=modes,
            ),
            since(served),
        )
        for (served, modes), page, (name, (reqs, context)) in product(SERVED.items(), (1, 64, 128), sizes.items())
    ]


def odd_geometries() -> Sequence[Case]:
    """Return attention shapes and draft shapes that a backend may refuse, each with small limits."""
    base = AttentionShape(8, 2, 128, 64)
    attention: dict[str, dict[str, object]] = {
        "mha": {"num_kv_heads": 8},
        "mqa": {"num_kv_heads": 1},
        "gqa3": {"num_qo_heads": 6},
        "heads1": {"num_qo_heads": 1, "num_kv_heads": 1},
        **{f"dim{dim}": {"head_dim": dim} for dim in (1, 64, 80, 96, 100, 256, 576)},
        **{f"page{page}": {"page_size": page} for page in (1, 2, 3, 5, 16, 32, 100, 256, 1024)},
        **{f"window{left}": {"window_left": left} for left in (0, 1, 63, 4095)},
        "cap": {"logits_soft_cap": 30.0},
        "cap-window": {"logits_soft_cap": 30.0, "window_left": 127},
        "scale": {"softmax_scale": 1.0},
        **{kind: {"q_dtype": kind, "kv_dtype": kind} for kind in ("float32", "float16")},
        "fp8": {"kv_dtype": "float8_e4m3fn"},
        "mixed": {"q_dtype": "float16", "kv_dtype": "bfloat16"},
        "sinks": {"sinks": True},
    }
    found = {name: (replace(base, **change), DraftShape(2, 3, 7)) for name, change in attention.items()}  # type: ignore[arg-type]
    for k, s, d in ((1, 1, 1), (1, 4, 4), (1, 1, 9), (8, 1, 33), (8, 5, 64), (3, 2, 65), (16, 9, 200)):
        found[f"k{k}s{s}d{d}"] = (base, DraftShape(k, s, d))
    return [
        *_invariant_geometries(base),
        *_module_geometries(base),
        *(
            Case(
                f"{served}-{name}{'-overlap' if overlap else ''}",
                Geometry.create(
                    shape,
                    Limits(3, 300, 40, (4,), overlap),
                    DraftShape() if modes == PLAIN_MODES else draft,
                    modes=modes,
                ),
                (1, 4) if shape.sinks else (1, 0),
            )
            for (served, modes), (name, (shape, draft)), overlap in product(
                SERVED.items(), found.items(), (False, True)
            )
            if served != IN_1_3 and (modes != PLAIN_MODES or draft == DraftShape(2, 3, 7))
        ),
    ]


def _module_geometries(shape: AttentionShape) -> list[Case]:
    """Return geometries of several MTP modules, with more rows in DRAFT_EXTEND than in any other mode."""
    found = {"modules2": DraftShape(1, 1, 5, num_modules=2), "modules3": DraftShape(2, 3, 32, num_modules=3)}
    limits = Limits(3, 300, 40, (4,))
    return [
        Case(f"draft-{name}", Geometry.create(shape, limits, draft, modes=DRAFT_MODES), (1, 5))
        for name, draft in found.items()
    ]


def _invariant_geometries(shape: AttentionShape) -> list[Case]:
    """Return geometries with batch invariance, for which a backend may have other buffers."""
    limits = Limits(3, 300, 40, (4,), batch_invariant=True)
    drafts = {served: DraftShape() if modes == PLAIN_MODES else DraftShape(2, 3, 7) for served, modes in PROVED.items()}
    return [
        Case(f"{served}-invariant", Geometry.create(shape, limits, draft, modes=PROVED[served]), (1, 5))
        for served, draft in drafts.items()
    ]


def odd_trees() -> Sequence[Case]:
    """Return heads and trees on pages of 128 (the only page size of some kernels), and trees deeper than the window."""
    tree = DraftShape(2, 3, 7)
    found = {
        "page128-mqa": (replace(MANDATORY, num_kv_heads=1), tree),
        "page128-gqa3": (replace(MANDATORY, num_qo_heads=6), tree),
        "page128-k8s5d64": (MANDATORY, DraftShape(8, 5, 64)),
        "page128-k3s2d65": (MANDATORY, DraftShape(3, 2, 65)),
        "window7-k2s20d40": (replace(MANDATORY, page_size=64, window_left=7), DraftShape(2, 20, 40)),
    }
    return [
        Case(f"{served}-{name}", Geometry.create(shape, Limits(3, 300, 40, (4,)), draft, modes=modes), (1, 2))
        for (served, modes), (name, (shape, draft)) in product(SERVED.items(), found.items())
        if modes not in (PLAIN_MODES, CORE_MODES)
    ]
