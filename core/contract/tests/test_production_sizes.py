"""Tests that every profile meets production sizes. The sizes are computed from the cases of all host items."""

from __future__ import annotations

import pytest

from draftmark.geometry import Mode
from draftmark_contract.check import Tier
from draftmark_contract.production_sizes import FEATURES, ROUNDED, WITH_MODES, Shown, gaps, shown_by
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


def test_every_profile_is_of_a_known_kind() -> None:
    """A new profile must be a feature, a shape, of state or of a mode, so that its sizes are defined."""
    assert FEATURES | SHAPES | OF_STATE | WITH_MODES | {Profile.CORE} == set(Profile)
