"""Profiles: named sets of features that a backend can serve. A "conforms" verdict lists the profiles served in full.

An item needs the profiles that its geometry needs (`needs`). A backend serves a set of profiles in full under two
conditions (`served_in_full`). Every item that needs nothing outside the set passed. At least one item of each profile
passed, in the core's own shape for every profile except those of shapes (`SHAPES`). No backend may refuse the core
profile: EXTEND and DECODE, bfloat16, 8 query heads and 2 KV heads of 128, pages of 128 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from functools import cache
from typing import Any

from draftmark.geometry import (
    FP8_DS_MLA,
    PLAIN_ROWS,
    AttentionShape,
    Form,
    Geometry,
    Mode,
    Recurrence,
    StateGeometry,
)

MANDATORY = AttentionShape(num_qo_heads=8, num_kv_heads=2, head_dim=128, page_size=128)
"""Shape that every backend must serve."""


class Profile(StrEnum):
    """Profiles (feature sets that a backend can serve), in the order in which a verdict lists them."""

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
    """RAGGED_VERIFY: the device decides the number of rows of each request."""
    DRAFT_BLOCKS = "draft blocks"
    """DRAFT_BLOCK: a draft model proposes a whole block of tokens at once."""
    WINDOW = "window"
    SOFT_CAP = "soft cap"
    SINKS = "sinks"
    """A learned logit per query head that has no value vector (gpt-oss)."""
    FP8 = "fp8"
    WIDE_TAILS = "wide tails"
    """Tails of more than 32 slots, so that a mask row needs several words."""
    OVERLAP = "overlap"
    """A round is sent before the host sees the last one: lengths are unknown to the host, or exceed max_context_len."""
    ENGINE_FORMS = "engine forms"
    """An engine's own slots, page tables or strided KV."""
    BATCH_INVARIANCE = "batch invariance"
    """`Limits.batch_invariant`: output bits of a request that do not depend on its batch."""
    LATENT = "latent"
    """Latent rows of 512 + 64 elements (MLA, absorbed): 8 to 128 heads of a rank, pages of 1 to 128 tokens."""
    LATENT_SHAPES = "latent shapes"
    """Latent rows of other widths, other head counts and page sizes, and rows with a window, cap, sinks or 8 bits."""
    LATENT_PARTS = "latent parts"
    """Latent rows in two buffers, value part and rest (`Form.LATENT_PARTS`)."""
    CHOSEN_KEYS = "chosen keys"
    """Latent rows with lists of keys that an indexer chose for each query row (DeepSeek V3.2, GLM-5)."""
    FP8_DS_MLA = "656-byte rows"
    """Latent rows of 656 bytes, with a scale for each 128 e4m3 numbers (`FP8_DS_MLA`)."""
    NARROW_VALUES = "narrow values"
    """Values with fewer elements than keys, such as 128 and 192 in un-absorbed MLA prefill."""
    DELTA = "delta"
    """Recurrent state with a delta rule (Gated DeltaNet, KDA): prompts, decodes and verified chains."""
    DECAY = "decay"
    """Recurrent state with decay only (Mamba2, Mamba1, Lightning)."""
    CONVOLUTION = "convolution"
    """A short convolution without recurrence (LFM2)."""
    STATE_TREES = "state trees"
    """Verified trees over recurrent state or a convolution."""
    STATE_CHECKPOINTS = "state checkpoints"
    """States saved at multiples of `Limits.state_interval`."""


Features = frozenset[Profile]
MODEL_HEAD_DIMS = (64, 128, 256)
MODEL_PAGES = (16, 32, 64, 128)
MODEL_DTYPES = ("bfloat16", "float16")
FP8_DTYPE = "float8_e4m3fn"
MOST_REQUESTS, MOST_TOKENS = 1024, 2**18
"""Limits above which a geometry counts as odd."""
TAILED = frozenset({Mode.VERIFY, Mode.DRAFT, Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK})
"""Modes with tails that may need several mask words."""
MODES_OF: dict[Profile, tuple[Mode, ...]] = {
    Profile.CORE: (Mode.EXTEND, Mode.DECODE),
    Profile.TREE: (Mode.VERIFY,),
    Profile.DRAFT_STEPS: (Mode.DRAFT, Mode.DRAFT_EXTEND),
    Profile.RAGGED_VERIFY: (Mode.RAGGED_VERIFY,),
    Profile.DRAFT_BLOCKS: (Mode.DRAFT_BLOCK,),
    Profile.WIDE_TAILS: tuple(mode for mode in Mode if mode in TAILED),
    Profile.STATE_TREES: (Mode.VERIFY, Mode.RAGGED_VERIFY),
    Profile.STATE_CHECKPOINTS: (Mode.VERIFY, Mode.RAGGED_VERIFY),
}
"""Modes that belong to a profile. A profile that is not listed can occur in every mode."""
MODES = frozenset({Profile.TREE, Profile.DRAFT_STEPS})
ROWS = frozenset(
    {
        Profile.LATENT,
        Profile.LATENT_SHAPES,
        Profile.LATENT_PARTS,
        Profile.CHOSEN_KEYS,
        Profile.FP8_DS_MLA,
        Profile.NARROW_VALUES,
    }
)
"""Profiles of layers with values that are not as wide as their keys, or are a part of them, or with chosen keys."""
RECURRENCES = {
    Recurrence.DELTA: Profile.DELTA,
    Recurrence.DECAY: Profile.DECAY,
    Recurrence.NONE: Profile.CONVOLUTION,
}
"""Profile of each kind of layer with recurrent state."""
OF_STATE = frozenset(RECURRENCES.values()) | {Profile.STATE_TREES, Profile.STATE_CHECKPOINTS}
"""Profiles of layers with recurrent state. Only a plugin that serves such layers runs their items."""
SHAPES = ROWS | {Profile.MODEL_SHAPES, Profile.ODD_SHAPES}
"""Profiles of geometries with another shape than the core's. A geometry needs at most one of them."""
LATENT_ROW, LATENT_HEADS, LATENT_PAGES = (576, 512), (8, 12, 16, 32, 64, 128), (1, 16, 32, 64, 128)
"""Row and value width, query heads of a rank, and page sizes of the latent profile."""
ADDED_TO_STATE = OF_STATE - frozenset(RECURRENCES.values())
"""Features of a layer with recurrent state, in addition to its recurrence."""
SPECIAL = frozenset(Profile) - MODES - {Profile.CORE, Profile.MODEL_SHAPES}
"""Features that are rarer than the modes and shapes that they come with."""


def _has_core_shape(geometry: Geometry) -> bool:
    a = geometry.attention
    heads = (a.num_qo_heads, a.num_kv_heads, a.head_dim, a.page_size)
    wanted = (MANDATORY.num_qo_heads, MANDATORY.num_kv_heads, MANDATORY.head_dim, MANDATORY.page_size)
    return heads == wanted and a.q_dtype == MANDATORY.q_dtype


def _rows_of(geometry: Geometry) -> Profile | None:
    """Return the profile of `ROWS` that a geometry needs; None if its values are apart and as wide as its keys."""
    a = geometry.attention
    if a.row_format == FP8_DS_MLA:
        return Profile.FP8_DS_MLA
    if a.chosen_width:
        return Profile.CHOSEN_KEYS
    if not a.latent:
        return Profile.NARROW_VALUES if a.value_width != a.head_dim else None
    if Form.LATENT_PARTS in geometry.forms:
        return Profile.LATENT_PARTS
    usual = (a.head_dim, a.value_width) == LATENT_ROW and a.num_qo_heads in LATENT_HEADS
    usual = usual and a.page_size in LATENT_PAGES and a.q_dtype in MODEL_DTYPES and a.kv_dtype == a.q_dtype
    special = a.window_left >= 0 or a.logits_soft_cap > 0 or a.sinks or geometry.limits.batch_invariant
    return Profile.LATENT if usual and not special else Profile.LATENT_SHAPES


def _needs_rows(profile: Profile) -> Callable[[Geometry], bool]:
    return lambda g: _rows_of(g) is profile


def _odd(geometry: Geometry) -> bool:
    if _rows_of(geometry) is not None:
        return False
    a, limits = geometry.attention, geometry.limits
    shape = a.head_dim not in MODEL_HEAD_DIMS or a.page_size not in MODEL_PAGES
    dtypes = a.q_dtype not in MODEL_DTYPES or a.kv_dtype not in (a.q_dtype, FP8_DTYPE)
    large = geometry.max_reqs > MOST_REQUESTS or limits.max_context_len > MOST_TOKENS
    return bool(shape or dtypes or large)


def _has_mode_of(profile: Profile) -> Callable[[Geometry], bool]:
    return lambda g: not set(MODES_OF[profile]).isdisjoint(g.modes)


def _implied_forms(geometry: Geometry) -> set[Form]:
    """Return the forms that a geometry's rows imply: they belong to the profile of the rows."""
    plain = geometry.attention.row_format == PLAIN_ROWS
    return {Form.LATENT_PARTS} if plain else {Form.ENGINE_STORES}


NEEDS: dict[Profile, Callable[[Geometry], bool]] = {
    Profile.MODEL_SHAPES: lambda g: not _odd(g) and not _has_core_shape(g) and _rows_of(g) is None,
    Profile.ODD_SHAPES: _odd,
    **{profile: _has_mode_of(profile) for profile in (*MODES, Profile.RAGGED_VERIFY, Profile.DRAFT_BLOCKS)},
    Profile.WINDOW: lambda g: g.attention.window_left >= 0,
    Profile.SOFT_CAP: lambda g: g.attention.logits_soft_cap > 0,
    Profile.SINKS: lambda g: g.attention.sinks,
    Profile.FP8: lambda g: g.attention.kv_dtype == FP8_DTYPE and g.attention.row_format == PLAIN_ROWS,
    Profile.WIDE_TAILS: lambda g: g.mask_words > 1 and not TAILED.isdisjoint(g.modes),
    Profile.OVERLAP: lambda g: g.limits.overshoots or g.limits.host_lags,
    Profile.ENGINE_FORMS: lambda g: bool(set(g.forms) - _implied_forms(g)),
    Profile.BATCH_INVARIANCE: lambda g: g.limits.batch_invariant,
    **{profile: _needs_rows(profile) for profile in ROWS},
}
"""Condition under which a geometry needs each profile; the core profile is always needed."""


@cache
def profiles_of(geometry: Geometry | StateGeometry) -> Features:
    """Return the profiles that a geometry needs in addition to the core; an empty set means the core only."""
    if isinstance(geometry, StateGeometry):
        return _profiles_of_state(geometry)
    return frozenset(profile for profile, holds in NEEDS.items() if holds(geometry))


def needs(value: Any) -> Features:
    """Return the profiles that a case value needs, from the geometries in it. Without one it needs only the core."""
    if isinstance(value, (Geometry, StateGeometry)):
        return profiles_of(value)
    if isinstance(value, (tuple, list)):
        return frozenset().union(*map(needs, value))
    geometry = getattr(value, "geometry", None)
    return needs(geometry) if geometry is not None else frozenset()


def _profiles_of_state(geometry: StateGeometry) -> Features:
    verifies = not {Mode.VERIFY, Mode.RAGGED_VERIFY}.isdisjoint(geometry.modes)
    trees = {Profile.STATE_TREES} if verifies and geometry.draft.topk > 1 else set()
    checkpoints = {Profile.STATE_CHECKPOINTS} if geometry.limits.state_interval else set()
    return frozenset({RECURRENCES[geometry.state.recurrence], *trees, *checkpoints})


def shown_in_core_shape(items: Iterable[Features]) -> Features:
    """Return the profiles that have at least one item in the core's own shape. `items` are the needs of all items."""
    return frozenset().union(*(one for one in set(items) if not one & SHAPES))


def served_in_full(
    met: Iterable[Features], unmet: Iterable[Features], in_core_shape: Features = frozenset()
) -> list[Profile]:
    """Return the profiles served in full, in their order. CORE is absent if a core item did not pass.

    Args:
        met: needs of each item that passed and can count as proof of a profile.
        unmet: needs of each item that failed, was refused, was declared as a known failure, or was not judged.
        in_core_shape: profiles that only an item in the core's own shape can prove.
    """
    met, unmet = set(met), set(unmet)
    named = set(Profile) - {Profile.CORE} - _dropped(unmet)
    # First drop profiles that no passed item needs, then profiles that passed items need only with a dropped one.
    while True:
        shown = frozenset().union(*(one - in_core_shape if one & SHAPES else one for one in met if one <= named))
        if shown == named:
            break
        named &= shown
    core = {Profile.CORE} if frozenset() in met and frozenset() not in unmet else set()
    return [profile for profile in Profile if profile in named | core]


def _dropped(unmet: set[Features]) -> set[Profile]:
    """Return profiles to drop, so that each unmet item needs a dropped one. Items with the fewest needs go first."""
    lost: set[Profile] = set()
    for size in sorted({len(one) for one in unmet}):
        open_ones = [one for one in unmet if len(one) == size and not one & lost]
        lost |= frozenset().union(*map(_rarest, open_ones))
    return lost


def _rarest(features: Features) -> Features:
    """Return the rarest features among an unmet item's needs: of rows, of state, special ones, modes, or all.

    An unmet item of latent rows therefore costs no profile of other layers.
    """
    return features & ROWS or features & ADDED_TO_STATE or features & SPECIAL or features & MODES or features
