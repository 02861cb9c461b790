"""Tests of the KV slots that the judge assigns to the requests of a scene (one forward)."""

from __future__ import annotations

import pytest

from draftmark import Mode
from draftmark_sglang_judge.requests import place
from draftmark_sglang_judge.setups import SETUPS, Scene, eager_scenes, replayed, replayed_modes

DRAFTING = [one for one in SETUPS.values() if one.speculates]


@pytest.mark.parametrize("setup", SETUPS.values(), ids=str)
def test_no_two_requests_share_a_slot(setup) -> None:  # type: ignore[no-untyped-def]
    """In every scene, all slots differ, and no request uses page 0, SGLang's padding page."""
    scenes = [*eager_scenes(setup), *(one for mode in replayed_modes(setup) for one in replayed(setup, mode))]
    for scene in scenes:
        slots = [slot for row in place(scene, setup, 2048 // setup.page_size).slots for slot in row]
        assert len(slots) == len(set(slots)) and min(slots) >= setup.page_size, scene.name


@pytest.mark.parametrize("setup", DRAFTING, ids=str)
def test_each_branch_has_its_own_slots(setup) -> None:  # type: ignore[no-untyped-def]
    """Branches have different slots after the prefix, and different pages if a page holds several tokens."""
    placed = place(Scene("draft", Mode.DRAFT, (5, 33)), setup, 2048 // setup.page_size)
    for n, length in enumerate((5, 33)):
        mine = [[placed.draft_slot(n, t, s) for s in range(setup.num_steps)] for t in range(setup.topk)]
        flat = [slot for branch in mine for slot in branch]
        assert len(flat) == len(set(flat)) and not set(flat) & set(placed.slots[n][:length])
        pages = [{slot // setup.page_size for slot in branch} for branch in mine]
        if setup.page_size > 1:
            assert all(not one & other for i, one in enumerate(pages) for other in pages[:i])


@pytest.mark.parametrize("setup", DRAFTING, ids=str)
def test_branches_start_with_a_copy_of_the_last_page(setup) -> None:  # type: ignore[no-untyped-def]
    """If a page holds several tokens, each further branch starts with a copy of the prefix's last, partial page."""
    placed = place(Scene("draft", Mode.DRAFT, (5, 64)), setup, 2048 // setup.page_size)
    if setup.page_size == 1 or setup.topk == 1:
        assert placed.copied == []
        return
    copies = [copy for _, copy in placed.copied]
    assert [slot for slot, _ in placed.copied] == list(placed.slots[0][:5]) * (setup.topk - 1)
    assert copies == [placed.draft_slot(0, t, 0) - 5 + j for t in range(1, setup.topk) for j in range(5)]
