"""Tests of profiles (optional features): an item needs those of its geometry; a verdict names only complete ones."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark.geometry import (
    DRAFT_MODES,
    TARGET_MODES,
    AttentionShape,
    BatchGeometry,
    DraftShape,
    Geometry,
    Limits,
    Mode,
)
from draftmark_contract.check import Tier
from draftmark_contract.profiles import (
    ADDED_TO_STATE,
    MANDATORY,
    SHAPES,
    Profile,
    needs,
    profiles_of,
    served_in_full,
    shown_in_core_shape,
)
from draftmark_contract.runner.item import all_items
from draftmark_contract.sizing.geometries import mandatory

CORE: frozenset[Profile] = frozenset()
TREE, WINDOW, CAP, MODEL = ({Profile.TREE}, {Profile.WINDOW}, {Profile.SOFT_CAP}, {Profile.MODEL_SHAPES})
ROWS = {Profile.LATENT}


def _geometry(
    attention: AttentionShape = MANDATORY, draft: DraftShape | None = None, overlap: bool = False, **more: object
) -> Geometry:
    limits = Limits(3, 300, 40, (4,), overlap)
    return Geometry.create(attention, limits, draft or DraftShape(), modes=more.get("modes", mandatory().modes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("geometry", "wanted"),
    [
        (_geometry(), set()),
        (_geometry(replace(MANDATORY, num_qo_heads=32, num_kv_heads=8)), MODEL),
        (_geometry(replace(MANDATORY, head_dim=64, page_size=16)), MODEL),
        (_geometry(replace(MANDATORY, head_dim=576)), {Profile.ODD_SHAPES}),
        (_geometry(replace(MANDATORY, page_size=1)), {Profile.ODD_SHAPES}),
        (_geometry(replace(MANDATORY, q_dtype="float16")), {Profile.ODD_SHAPES}),
        (_geometry(replace(MANDATORY, window_left=0)), WINDOW),
        (_geometry(replace(MANDATORY, logits_soft_cap=30.0)), CAP),
        (_geometry(replace(MANDATORY, kv_dtype="float8_e4m3fn")), {Profile.FP8}),
        (_geometry(overlap=True), {Profile.OVERLAP}),
        (_geometry(draft=DraftShape(2, 3, 33)), set()),
        (_geometry(draft=DraftShape(2, 3, 33), modes=TARGET_MODES), {Profile.TREE, Profile.WIDE_TAILS}),
        (_geometry(draft=DraftShape(2, 3, 7), modes=DRAFT_MODES), {Profile.DRAFT_STEPS}),
    ],
    ids=lambda value: "+".join(sorted(value)) or "core" if isinstance(value, set) else "",
)
def test_needs_follow_from_the_geometry(geometry: Geometry, wanted: set[Profile]) -> None:
    """A geometry needs one profile for each of its values outside the mandatory geometry."""
    assert profiles_of(geometry) == wanted


def test_needs_of_nested_values() -> None:
    """A forward, a pair or a list needs the profiles of all geometries in it."""
    window = _geometry(replace(MANDATORY, window_left=3))
    assert needs((SimpleNamespace(geometry=window), _geometry(overlap=True))) == {Profile.WINDOW, Profile.OVERLAP}
    assert needs(None) == CORE


def test_cases_without_geometry_declare_their_needs() -> None:
    """A case declares a geometry if its value contains none; only `load` and `supports` cases need none."""

    def holds(value: object) -> bool:
        if isinstance(value, (tuple, list)):
            return any(map(holds, value))
        return isinstance(value, BatchGeometry) or hasattr(value, "geometry")

    silent = {item.check.name for item in all_items() if item.case.geometry is None and not holds(item.case.value)}
    assert {name for name in silent if not name.startswith(("load.", "supports."))} == set()


def test_core_profile_has_items_in_every_tier() -> None:
    """Every tier has items that need only the core profile, such as loading the plugin."""
    core = [item for item in all_items() if not item.needs]
    assert {item.tier for item in core} == {item.tier for item in all_items()}
    for name in (
        "supports.mandatory_profile",
        "load.describes_itself",
        "numerics.match_float64",
        "graphs.replay_equals_eager",
    ):
        assert any(item.check.name == name for item in core), name


@pytest.mark.parametrize(
    ("met", "unmet", "named"),
    [
        ([CORE, TREE, WINDOW], [], "core, tree, window"),
        ([CORE, TREE], [CORE], "tree"),
        ([CORE, TREE], [TREE], "core"),
        ([CORE, TREE, WINDOW], [TREE | WINDOW], "core, tree"),
        ([CORE, TREE, WINDOW, CAP], [CAP, WINDOW | CAP], "core, tree, window"),
        ([CORE, TREE, WINDOW, CAP], [WINDOW | CAP], "core, tree"),
        ([CORE, MODEL], [TREE, WINDOW | TREE], "core, model shapes"),
        ([CORE, WINDOW | MODEL], [MODEL], "core"),
        ([CORE, MODEL, TREE], [TREE | MODEL], "core, model shapes"),
        ([CORE, TREE, WINDOW, ROWS], [ROWS | TREE | WINDOW], "core, tree, window"),
        ([CORE, TREE, ROWS], [ROWS], "core, tree"),
    ],
)
def test_profiles_served_in_full(met: list[set[Profile]], unmet: list[set[Profile]], named: str) -> None:
    """An item that did not pass removes the rarest profile it needs, unless a profile it needs is already removed."""
    found = served_in_full([frozenset(one) for one in met], [frozenset(one) for one in unmet])
    assert ", ".join(found) == named


FEATURES = st.lists(st.frozensets(st.sampled_from([one for one in Profile if one is not Profile.CORE]), max_size=4))


@settings(max_examples=300, derandomize=True, database=None)
@given(FEATURES, FEATURES)
def test_no_unmet_item_needs_only_named_profiles(
    met: list[frozenset[Profile]], unmet: list[frozenset[Profile]]
) -> None:
    """If an item did not pass, at least one profile that it needs is missing from the verdict.

    Each named profile has a passed item as evidence. That item needs the named profile and only named profiles.
    """
    named = set(served_in_full(met, unmet)) - {Profile.CORE}
    assert not [one for one in unmet if one and one <= named]
    assert all(any(profile in one and one <= named for one in met) for profile in named)


def test_every_profile_but_shapes_is_proved_in_the_core_shape() -> None:
    """A profile is named only with a passed host item in the core's own shape, which needs no other special feature."""
    host = [item.needs for item in all_items((Tier.HOST,))]
    wanted = set(Profile) - SHAPES - {Profile.CORE}
    assert shown_in_core_shape(host) == wanted
    alone = {one for one in host if len(one) == 1}
    assert {profile for profile in wanted if {profile} not in alone} == {Profile.WIDE_TAILS, *ADDED_TO_STATE}
    small_only = [frozenset({profile, Profile.MODEL_SHAPES}) for profile in wanted]
    named = served_in_full([CORE, frozenset({Profile.MODEL_SHAPES}), *small_only], [], shown_in_core_shape(host))
    assert named == [Profile.CORE, Profile.MODEL_SHAPES]


def test_modes_are_compared_by_value() -> None:
    """A geometry with mode VERIFY needs the tree profile even if its draft shape is a chain."""
    assert profiles_of(_geometry(modes=(Mode.EXTEND, Mode.VERIFY))) == {Profile.TREE}
