"""Sizes that every profile must meet in some item, and the profiles that do not. Does not import torch.

A feature that is tested only at the sizes at which it joined the suite can be wrong at every other size. So each
profile must meet thousands of keys and a crowd of requests in every mode that it has, and every range of GQA groups,
head dimensions and pages. A profile that any mode can have must meet these ranges in the core's modes, because a
backend may serve no others. A test of the suite computes this from the cases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from draftmark.geometry import CORE_MODES, STATE_MODES, AttentionShape, Gate, Mode, StateGeometry, StateShape

from .cases.forwards import ForwardCase
from .profiles import (
    ADDED_TO_STATE,
    LATENT_HEADS,
    LATENT_PAGES,
    MODEL_HEAD_DIMS,
    MODEL_PAGES,
    MODES_OF,
    OF_STATE,
    ROWS,
    SHAPES,
    Features,
    Profile,
)

KEYS = 2048
"""Keys of the longest request of a forward: more than any tile, page or split of a small case."""
REQUESTS = 24
"""Live requests of one forward."""
GROUPS = ((1, 1), (2, 4), (5, 8), (9, 16))
"""Ranges of query heads per KV head, both ends included."""
HEAD_DIMS, PAGES = MODEL_HEAD_DIMS, MODEL_PAGES
"""Head dimensions and page sizes of models."""
ROUNDED = "fp8 rounded to e4m3"
"""fp8 KV with `AttentionShape.round_to_e4m3`, for which a backend may have kernels of its own."""
ROW_WIDTHS = ((512, 512), (320, 256), (160, 128))
"""Row and value widths of latent layers, besides 576 and 512."""
WITH_MODES = frozenset({Profile.TREE, Profile.DRAFT_STEPS, Profile.RAGGED_VERIFY, Profile.DRAFT_BLOCKS})
"""Profiles that follow from the mode of a forward."""
FEATURES = frozenset(Profile) - WITH_MODES - SHAPES - OF_STATE - {Profile.CORE}
"""Profiles that any forward may need, in addition to those of its mode and its shape."""


@dataclass(frozen=True)
class Shown:
    """Holds the sizes of one forward, and the profiles that its item needs."""

    needs: Features
    mode: Mode
    keys: int
    requests: int
    layer: AttentionShape | StateShape


def modes_of(profile: Profile) -> tuple[Mode, ...]:
    """Return the modes in which a geometry can need a profile."""
    return MODES_OF.get(profile, STATE_MODES if profile in OF_STATE else tuple(Mode))


def shown_by(needs: Features, value: Any) -> Iterator[Shown]:
    """Yield the sizes of every forward in a case value. A geometry from which a check builds forwards shows none."""
    if isinstance(value, (tuple, list)):
        for one in value:
            yield from shown_by(needs, one)
        return
    live = [one for one in value.requests if one.live] if isinstance(value, ForwardCase) else []
    if live:
        keys = max(one.prefix + one.tail for one in live)
        geometry = value.geometry
        layer = geometry.state if isinstance(geometry, StateGeometry) else geometry.attention
        yield Shown(needs, value.mode, keys, len(live), layer)


def gaps(shown: Iterable[Shown]) -> list[str]:
    """Return a sentence for each size that a profile never meets, and for each pair of features that never meet."""
    large = [one for one in shown if one.keys >= KEYS and one.requests >= REQUESTS]
    found = [
        f"{profile} in {mode}: no item of {REQUESTS} requests and {KEYS} keys without another feature"
        for profile in Profile
        for mode in modes_of(profile)
        if not any(one.mode is mode and _needs_only(one, profile) for one in large)
    ]
    rounded = {one.mode for one in large if isinstance(one.layer, AttentionShape) and one.layer.round_to_e4m3}
    found += [f"{ROUNDED} in {mode}: no item of {REQUESTS} requests and {KEYS} keys" for mode in set(Mode) - rounded]
    for profile in sorted(set(Profile) - {Profile.CORE}):
        core = set(modes_of(profile)) & set(CORE_MODES)
        modes = core if len(core) >= len(GROUPS) else modes_of(profile)
        mine = [one.layer for one in large if profile in one.needs and one.mode in modes]
        found += [f"{profile}: no item with {what}" for what, holds in _ranges(profile) if not any(map(holds, mine))]
    pairs = combinations(sorted(FEATURES), 2)
    return found + [f"{a} with {b}: no large item" for a, b in pairs if not any({a, b} <= one.needs for one in large)]


def _needs_only(shown: Shown, profile: Profile) -> bool:
    """Return True if the item needs the profile and no feature except it. CORE and SHAPES need an exact shape."""
    own = set() if profile is Profile.CORE else {profile}
    shapes = set() if profile in (Profile.CORE, *SHAPES, *OF_STATE) else SHAPES
    shapes = OF_STATE - ADDED_TO_STATE if profile in ADDED_TO_STATE else shapes
    return own <= shown.needs <= own | WITH_MODES | shapes  # a geometry needs at most one of SHAPES


def _ranges(profile: Profile) -> list[tuple[str, Callable[[Any], bool]]]:
    """Return each range that a profile must meet, with its name. Other shapes have sizes of their own."""
    if profile in OF_STATE:
        return _ranges_of_state(profile)
    if profile in ROWS:
        return _ranges_of_rows(profile)
    found: list[tuple[str, Callable[[AttentionShape], bool]]] = [
        (f"groups of {least} to {most}", lambda a, least=least, most=most: least <= a.group_size <= most)  # type: ignore[misc]
        for least, most in GROUPS
    ]
    if profile is Profile.ODD_SHAPES:
        return found
    found += [(f"head_dim {dim}", lambda a, dim=dim: a.head_dim == dim) for dim in HEAD_DIMS]  # type: ignore[misc]
    return found + [(f"pages of {size}", lambda a, size=size: a.page_size == size) for size in PAGES]


def _ranges_of_rows(profile: Profile) -> list[tuple[str, Callable[[AttentionShape], bool]]]:
    """Return the ranges of a profile of latent rows, or of narrow values."""
    heads: tuple[int, ...] = {Profile.LATENT: LATENT_HEADS, Profile.LATENT_SHAPES: (1, 5, 20, 96)}.get(profile, ())
    pages: tuple[int, ...] = {Profile.LATENT: LATENT_PAGES, Profile.LATENT_SHAPES: (48,)}.get(profile, (16, 128))
    widths = {Profile.LATENT_SHAPES: ROW_WIDTHS, Profile.NARROW_VALUES: ((192, 128),)}.get(profile, ((576, 512),))
    found: list[tuple[str, Callable[[AttentionShape], bool]]] = [
        (f"{count} heads", lambda a, count=count: a.num_qo_heads == count)  # type: ignore[misc]
        for count in heads
    ]
    found += [(f"pages of {size}", lambda a, size=size: a.page_size == size) for size in pages]  # type: ignore[misc]
    return found + [
        (f"rows of {row} and {value}", lambda a, row=row, value=value: (a.head_dim, a.value_width) == (row, value))
        for row, value in widths
    ]


def _ranges_of_state(profile: Profile) -> list[tuple[str, Callable[[Any], bool]]]:
    """Return the ranges of a profile of recurrent state: elements of a state, heads of a key head, gates and taps."""
    if profile in ADDED_TO_STATE:
        return []
    taps = {Profile.DELTA: (4,), Profile.DECAY: (0, 4), Profile.CONVOLUTION: (3,)}[profile]
    found: list[tuple[str, Callable[[Any], bool]]] = [
        (f"convolutions of {count} taps", lambda s, count=count: s.conv_kernel == count)  # type: ignore[misc]
        for count in taps
    ]
    if profile is Profile.CONVOLUTION:
        return found
    sizes = {Profile.DELTA: ((128, 128),), Profile.DECAY: ((64, 128), (128, 128))}[profile]
    found += [
        (f"states of {value} x {key}", lambda s, value=value, key=key: (s.value_dim, s.key_dim) == (value, key))  # type: ignore[misc]
        for value, key in sizes
    ]
    found += [
        (f"{count} heads of a key head", lambda s, count=count: s.heads_per_key == count)  # type: ignore[misc]
        for count in {Profile.DELTA: (1, 2), Profile.DECAY: (1, 16)}[profile]
    ]
    gates = {Profile.DELTA: (Gate.HEAD, Gate.KEY), Profile.DECAY: tuple(Gate)}[profile]
    return found + [(f"a gate of each {gate}", lambda s, gate=gate: s.gate is gate) for gate in gates]
