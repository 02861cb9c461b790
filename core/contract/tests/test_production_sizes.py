"""Tests that every profile meets production sizes. The sizes are computed from the cases of all host items."""

from __future__ import annotations

from itertools import combinations

import pytest

from draftmark.geometry import CORE_MODES, AttentionShape, Mode
from draftmark_contract.cases import features
from draftmark_contract.check import Tier
from draftmark_contract.production_sizes import FEATURES, KEYS, ROUNDED, WITH_MODES, Shown, gaps, shown_by
from draftmark_contract.profiles import OF_STATE, SHAPES, Profile
from draftmark_contract.runner.item import all_items


@pytest.fixture(scope="module")
def shown() -> list[Shown]:
    """Return the sizes of every forward in the cases of the host tier."""
    return [one for item in all_items((Tier.HOST,)) for one in shown_by(item.needs, item.case.value)]


def test_every_profile_meets_production_sizes(shown: list[Shown]) -> None:
    """Each profile has a large item in each of its modes, and meets each range of groups, head dimensions and pages."""
    assert not gaps(shown)


@pytest.mark.parametrize("profile", [one for one in Profile if one is not Profile.CORE])
def test_a_profile_without_large_items_is_a_gap(profile: Profile, shown: list[Shown]) -> None:
    """The gaps name a profile without items, and a profile with small items only."""
    rest = [one for one in shown if profile not in one.needs]
    small = [Shown(one.needs, one.mode, 133, 6, one.layer) for one in shown if profile in one.needs]
    for items in (rest, rest + small):
        assert any(gap.startswith(profile) for gap in gaps(items))


def test_rounded_products_without_large_items_are_a_gap(shown: list[Shown]) -> None:
    """The gaps name each mode in which no large item lets attention round to e4m3."""
    exact = [one for one in shown if not getattr(one.layer, "round_to_e4m3", False)]
    assert {gap.split(":")[0] for gap in gaps(exact)} >= {f"{ROUNDED} in {mode}" for mode in Mode}


@pytest.mark.parametrize("feature", [one for one in features.FEATURES if isinstance(one, Profile)])
def test_every_feature_meets_the_kv_heads_of_a_model(feature: str, shown: list[Shown]) -> None:
    """Each feature has a forward of thousands of keys with eight KV heads in a core mode; a crowd has at most two."""
    mine = [one for one in shown if feature in one.needs and one.mode in CORE_MODES and one.keys >= KEYS]
    assert max(getattr(one.layer, "num_kv_heads", 0) for one in mine) >= features.MANY_HEADS


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_meets_another_softmax_scale(mode: Mode, shown: list[Shown]) -> None:
    """Each mode has a large forward with a scale other than the default, which no profile names."""
    large = [one.layer for one in shown if one.mode is mode and one.keys >= KEYS]
    heads = [one for one in large if isinstance(one, AttentionShape) and not one.latent]
    assert any(one.softmax_scale != one.head_dim**-0.5 for one in heads)


def test_every_two_features_meet_without_others(shown: list[Shown]) -> None:
    """Every two features meet in a large VERIFY that needs no third one, because a backend may refuse the others."""
    large = [one.needs & set(features.FREE) for one in shown if one.mode is Mode.VERIFY and one.keys >= KEYS]
    assert not [two for two in combinations(features.FREE, 2) if set(two) not in large]


def test_every_profile_is_of_a_known_kind() -> None:
    """A new profile must be a feature, a shape, of state or of a mode, so that its sizes are defined."""
    assert FEATURES | SHAPES | OF_STATE | WITH_MODES | {Profile.CORE} == set(Profile)
