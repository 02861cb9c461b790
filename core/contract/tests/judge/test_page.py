"""Tests of the HTML page of `draftmark judge`."""

from __future__ import annotations

import pytest
from pages import assert_self_contained, details_open, wrong_cells

from draftmark_contract.judge.item import Outcome, Result
from draftmark_contract.judge.page import page
from draftmark_contract.judge.questions import questions
from draftmark_contract.judge.verdict import Verdict, rules_left_out
from draftmark_contract.judge.worker import run_item

from .defects import WindowOffByOne
from .paged import caps

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def faulty() -> str:
    """Return the page for a backend with a sliding window that is one key too short."""
    items = [one for one in questions(caps(WindowOffByOne)) if one.rule == "numerics.match_float64"]
    results = [run_item(one, "draftmark judge fake:PAGED") for one in items if "window" in one.id or "decode" in one.id]
    left = rules_left_out(["numerics.match_float64"], {"proof": "nothing is declared that could be proved"})
    return page(Verdict("fake:PAGED", {"engine": "fake 1.0", "device": "cpu"}, len(items), results, left))


def test_wrong_rows_are_drawn(faulty: str) -> None:
    """The first wrong rule is unfolded: its batch is drawn with the wrong rows marked, and its command is printed."""
    assert_self_contained(faulty)
    assert details_open(faulty, "1. numerics.match_float64")
    assert wrong_cells(faulty) and all(": wrong output" in one for one in wrong_cells(faulty))
    assert "draftmark judge fake:PAGED --item" in faulty and "engine" in faulty and "fake 1.0" in faulty


def test_rules_have_a_map_and_rules_without_items_are_folded(faulty: str) -> None:
    """The map shows the counts of each rule; rules without an item are in a folded list with their reason."""
    row = faulty[faulty.index("<th>numerics.match_float64") :].partition("</tr>")[0]
    assert "rule 22: " in row and " wrong</b>" in row and " right" in row
    assert not details_open(faulty, "of the contract, with the reason")
    assert "nothing is declared that could be proved" in faulty and "proof.needed_is_declared" in faulty


def test_reasons_of_items_that_did_not_run_are_folded_and_escaped() -> None:
    """Reasons why items did not run are folded, counted and escaped; without wrong items nothing is listed to fix."""
    results = [
        Result("numerics.match_float64[a]", Outcome.RIGHT),
        Result("numerics.match_float64[b]", Outcome.NOT_SERVED, "head_size <80>\nmore"),
        Result("numerics.match_float64[c]", Outcome.NOT_ASKED, "no graph"),
    ]
    text = page(Verdict("fake:<b>X</b>", {}, 3, results))
    assert_self_contained(text)
    assert not details_open(text, "not served: the engine") and "head_size &lt;80&gt;" in text
    assert "<b>X</b>" not in text and "What to fix first" not in text


@pytest.mark.parametrize(
    ("verdict", "kind", "words"),
    [
        (Verdict("x", items=1, results=[Result("a[b]", Outcome.RIGHT)]), "good", "1 right, 0 wrong"),
        (Verdict("x", items=2, results=[Result("a[b]", Outcome.RIGHT)]), "warn", "1 right, 0 wrong"),
        (
            Verdict("x", items=2, results=[Result("a[b]", Outcome.RIGHT)], selected=True),
            "cool",
            "no verdict on the whole",
        ),
        (Verdict("x", items=1, results=[Result("a[b]", Outcome.NOT_ASKED)]), "warn", "0 items run"),
        (Verdict("x", error="its library cannot be loaded"), "warn", "its library cannot be loaded"),
    ],
)
def test_only_a_whole_run_is_green(verdict: Verdict, kind: str, words: str) -> None:
    """The verdict's box is green only if every item ran and none was wrong."""
    text = page(verdict)
    assert f'class="verdict {kind}"' in text and words in text
