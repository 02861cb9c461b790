"""Profiles: what a backend can serve, by name; "conforms" names those that it serves in full.

An item needs the profiles that its geometry needs (`needs`). A backend serves a set of profiles in full when every item
that needs nothing outside the set was met, and at least one item of each profile was met (`served_in_full`). The core
profile is the one that nobody may refuse: EXTEND and DECODE, bfloat16, 8/2 heads of 128, pages of 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache
from typing import Any

from draftmark.geometry import Geometry, Mode

from .sizing.geometries import MANDATORY


class Profile(StrEnum):
    """In the order in which a verdict names them."""

    CORE = "core"
    MODEL_SHAPES = "model shapes"
    """Any head counts, head_dim 64, 128 or 256, pages of 16 to 128 tokens, float16."""
    ODD_SHAPES = "odd shapes"
    """Other head sizes, other page sizes, float32, KV of another 16-bit dtype, thousands of requests."""
    TREE = "tree"
    """VERIFY: the rows of a draft tree, or of a chain."""
    DRAFT_STEPS = "draft steps"
    """DRAFT and DRAFT_EXTEND: the draft model's own forwards."""
    RAGGED_VERIFY = "ragged verify"
    """Rows that the device decides."""
    DRAFT_BLOCKS = "draft blocks"
    """Whole blocks that a draft model proposes at once."""
    WINDOW = "window"
    SOFT_CAP = "soft cap"
    SINKS = "sinks"
    """A learned logit of each query head, without a value (gpt-oss)."""
    FP8 = "fp8"
    WIDE_TAILS = "wide tails"
    """Tails of more than 32 slots, so that a mask row takes several words."""
    OVERLAP = "overlap"
    """A round sent before the last one is seen: lengths that the host does not know, and beyond max_context_len."""
    ENGINE_FORMS = "engine forms"
    """An engine's own slots, page tables or strided KV."""


Features = frozenset[Profile]
MODEL_HEAD_DIMS = (64, 128, 256)
MODEL_PAGES = (16, 32, 64, 128)
MODEL_DTYPES = ("bfloat16", "float16")
FP8_DTYPE = "float8_e4m3fn"
MOST_REQUESTS, MOST_TOKENS = 1024, 2**18
"""Limits beyond which a geometry is odd."""
TAILED = frozenset({Mode.VERIFY, Mode.DRAFT, Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK})
"""Modes whose tails may take several mask words."""
MODES = frozenset({Profile.TREE, Profile.DRAFT_STEPS})
SPECIAL = frozenset(Profile) - MODES - {Profile.CORE, Profile.MODEL_SHAPES}
"""What is rarer than the modes and shapes it comes with."""


def _of_core(geometry: Geometry) -> bool:
    a = geometry.attention
    heads = (a.num_qo_heads, a.num_kv_heads, a.head_dim, a.page_size)
    wanted = (MANDATORY.num_qo_heads, MANDATORY.num_kv_heads, MANDATORY.head_dim, MANDATORY.page_size)
    return heads == wanted and a.q_dtype == MANDATORY.q_dtype


def _odd(geometry: Geometry) -> bool:
    a, limits = geometry.attention, geometry.limits
    shape = a.head_dim not in MODEL_HEAD_DIMS or a.page_size not in MODEL_PAGES
    dtypes = a.q_dtype not in MODEL_DTYPES or a.kv_dtype not in (a.q_dtype, FP8_DTYPE)
    large = geometry.max_reqs > MOST_REQUESTS or limits.max_context_len > MOST_TOKENS
    return bool(shape or dtypes or large)


NEEDS: dict[Profile, Callable[[Geometry], bool]] = {
    Profile.MODEL_SHAPES: lambda g: not _odd(g) and not _of_core(g),
    Profile.ODD_SHAPES: _odd,
    Profile.TREE: lambda g: Mode.VERIFY in g.modes,
    Profile.DRAFT_STEPS: lambda g: Mode.DRAFT in g.modes or Mode.DRAFT_EXTEND in g.modes,
    Profile.WINDOW: lambda g: g.attention.window_left >= 0,
    Profile.SOFT_CAP: lambda g: g.attention.logits_soft_cap > 0,
    Profile.SINKS: lambda g: g.attention.sinks,
    Profile.FP8: lambda g: g.attention.kv_dtype == FP8_DTYPE,
    Profile.RAGGED_VERIFY: lambda g: Mode.RAGGED_VERIFY in g.modes,
    Profile.DRAFT_BLOCKS: lambda g: Mode.DRAFT_BLOCK in g.modes,
    Profile.WIDE_TAILS: lambda g: g.mask_words > 1 and not TAILED.isdisjoint(g.modes),
    Profile.OVERLAP: lambda g: g.limits.overshoots or g.limits.host_lags,
    Profile.ENGINE_FORMS: lambda g: bool(g.forms),
}
"""Beside the core, what each profile asks of a geometry."""


@cache
def profiles_of(geometry: Geometry) -> Features:
    """What a geometry needs beside the core; the empty set is the core itself."""
    return frozenset(profile for profile, holds in NEEDS.items() if holds(geometry))


def needs(value: Any) -> Features:
    """What the value of a case needs, from the geometries that it holds. No geometry means the core."""
    if isinstance(value, Geometry):
        return profiles_of(value)
    if isinstance(value, (tuple, list)):
        return frozenset().union(*map(needs, value))
    geometry = getattr(value, "geometry", None)
    return needs(geometry) if geometry is not None else frozenset()


def served_in_full(met: Iterable[Features], unmet: Iterable[Features]) -> list[Profile]:
    """The profiles that are served in full, in their order; without the core when an item of the core is unmet.

    Args:
        met: what each item needs that was judged and is right.
        unmet: what each item needs that was refused, declared, not judged, or is wrong.
    """
    met, unmet = set(met), set(unmet)
    named = set(Profile) - {Profile.CORE} - _lost(unmet)
    while True:  # a profile that nothing shows is not named, nor what is shown only together with it
        shown = frozenset().union(*(one for one in met if one <= named))
        if shown == named:
            break
        named &= shown
    core = {Profile.CORE} if frozenset() in met and frozenset() not in unmet else set()
    return [profile for profile in Profile if profile in named | core]


def _lost(unmet: set[Features]) -> set[Profile]:
    """Profiles to leave out, so that no unmet item is within the rest; those that need least are decided first."""
    lost: set[Profile] = set()
    for size in sorted({len(one) for one in unmet}):
        open_ones = [one for one in unmet if len(one) == size and not one & lost]
        lost |= frozenset().union(*map(_blamed, open_ones))
    return lost


def _blamed(features: Features) -> Features:
    """Of what an unmet item needs, the rarest."""
    return features & SPECIAL or features & MODES or features
