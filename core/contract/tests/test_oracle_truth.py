"""Tests of the oracle, which computes by brute force the KV slots that each row sees, on hand-checked batches."""

from __future__ import annotations

from draftmark_contract.cases.trees import beams, verify_tree
from draftmark_contract.oracle.history import NO_PARENT, Request, chain, kv_slots
from draftmark_contract.oracle.truth import enumerate_truth


def test_token_slot_follows_the_page_table() -> None:
    """With pages of two tokens, tokens 0 and 1 of a request are in its first page and token 2 is in its next page."""
    request = Request(prefix=2, pages=(7, 3), parents=chain(1), rows=1)
    assert kv_slots(request, 2) == [14, 15, 6]


def test_decode_sees_the_prefix_and_itself() -> None:
    """A decode row sees the prefix and its own token."""
    truth = enumerate_truth([Request(3, (2, 0), chain(1), 1)], 2, -1)
    assert truth.visible == {(0, 0): (0, 1, 4, 5)}
    assert truth.writes == {(0, 0): 1}


def test_siblings_do_not_see_each_other() -> None:
    """In a tree, a child of the root sees the root and itself, and a grandchild sees only its ancestors and itself."""
    tree = Request(1, (0, 1, 2), (NO_PARENT, 0, 0, 2), 4)
    truth = enumerate_truth([tree], 2, -1)
    assert truth.visible[0, 1] == (0, 1, 2)
    assert truth.visible[0, 2] == (0, 1, 3)
    assert truth.visible[0, 3] == (0, 1, 3, 4)


def test_draft_rows_are_the_last_tail_slots() -> None:
    """At draft step 1 with two branches, the rows are tail slots 2 and 3, here both children of slot 0."""
    truth = enumerate_truth([Request(0, (0, 1), (NO_PARENT, NO_PARENT, 0, 0), 2)], 2, -1)
    assert truth.visible == {(0, 0): (0, 2), (0, 1): (0, 3)}
    assert truth.writes == {(0, 0): 2, (0, 1): 3}


def test_window_counts_positions() -> None:
    """A window counts positions, so with window 1 every child of the root sees the root, whatever its slot is."""
    star = Request(4, (0, 1, 2, 3), (NO_PARENT, 0, 0, 0), 4)
    truth = enumerate_truth([star], 2, 1)
    assert truth.visible[0, 0] == (3, 4)
    assert truth.visible[0, 3] == (4, 7)


def test_window_of_zero_contains_the_row_itself() -> None:
    """A window of 0 still contains the query's own token, because window_left counts only earlier positions."""
    assert enumerate_truth([Request(5, (0, 1, 2), chain(1), 1)], 2, 0).visible == {(0, 0): (5,)}


def test_empty_prefix_leaves_the_tail() -> None:
    """If the prefix is empty, the rows of a live request see only the tail."""
    assert enumerate_truth([Request(0, (4,), chain(2), 2)], 2, -1).visible == {(0, 0): (8,), (0, 1): (8, 9)}


def test_unused_rows_are_children_of_the_root() -> None:
    """Verify rows without a candidate token are children of the root, so each sees the root and its own token."""
    request = Request(0, tuple(range(6)), verify_tree("unused", 6, 0), 6)
    assert [request.lineage(slot) for slot in (2, 3, 5)] == [[2, 1, 0], [3, 0], [5, 0]]


def test_beams_grow_with_each_step() -> None:
    """The tail of a later draft step begins with that of an earlier step, and each parent is in the previous step."""
    later = beams(3, 3, 5)
    assert later[:6] == beams(3, 1, 5)
    assert all(slot // 3 - 1 == parent // 3 for slot, parent in enumerate(later) if slot >= 3)
