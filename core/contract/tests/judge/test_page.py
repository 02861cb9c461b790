"""Tests of the HTML page of `draftmark judge`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from pages import assert_fits, assert_self_contained, details_open, wrong_cells

from draftmark_contract.check import Tier
from draftmark_contract.judge.layer import LayerUnderTest
from draftmark_contract.judge.questions import questions
from draftmark_contract.runner.item import run_item
from draftmark_contract.runner.judging import Suite, judge
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.page import page
from draftmark_contract.runner.subject import Kind, Listed, Opened
from draftmark_contract.runner.verdict import Verdict

from .defects import WindowOffByOne
from .paged import caps

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def faulty() -> str:
    """Return the page for a backend with a sliding window that is one key too short."""
    items = [one for one in questions(caps(WindowOffByOne)) if one.rule == "numerics.match_float64"]
    chosen = [one for one in items if "window" in one.id or "decode" in one.id]
    results = [run_item(one, LayerUnderTest("draftmark judge fake:PAGED")) for one in chosen]
    facts = {"engine": "fake 1.0", "device": "cpu"}
    return page(verdict([one.id for one in chosen], results, "fake:PAGED", facts))


def verdict(
    items: Iterable[str], results: Sequence[Result], name: str = "x", facts: Mapping[str, str] | None = None
) -> Verdict:
    """Return the verdict on results of a layer with these items."""
    opened = Opened(name, Kind.LAYER, f"draftmark judge {name}", facts=facts or {})
    left = {"proof": "nothing is declared that could be proved"}
    return judge(Suite(opened, [Listed(one, Tier.HOST) for one in items], left), results)


def test_wrong_rows_are_drawn(faulty: str) -> None:
    """The first wrong rule is unfolded: its batch is drawn with the wrong rows marked, and its command is printed."""
    assert_self_contained(faulty)
    assert_fits(faulty)
    assert details_open(faulty, "1. numerics.match_float64")
    assert wrong_cells(faulty) and all(": wrong output" in one for one in wrong_cells(faulty))
    assert "draftmark judge fake:PAGED --item" in faulty and "engine" in faulty and "fake 1.0" in faulty


def test_rules_have_a_map_and_rules_without_items_are_folded(faulty: str) -> None:
    """The map shows the counts of each rule; rules without an item are in a folded list with their reason."""
    row = faulty[faulty.index("<th>numerics.match_float64") :].partition("</tr>")[0]
    assert "rule 22: " in row and " failed</b>" in row and " passed" in row
    assert not details_open(faulty, "of the contract, with the reason")
    assert "nothing is declared that could be proved" in faulty and "proof.needed_is_declared" in faulty


def test_reasons_of_items_that_did_not_run_are_folded_and_escaped() -> None:
    """Reasons why items did not run are folded, counted and escaped; without wrong items nothing is listed to fix."""
    results = [
        Result("numerics.match_float64[a]", "host", Outcome.PASSED),
        Result("numerics.match_float64[b]", "host", Outcome.REFUSED, "head_size <80>\nmore"),
        Result("numerics.match_float64[c]", "host", Outcome.UNJUDGED, "no graph"),
    ]
    text = page(verdict([one.item for one in results], results, "fake:<b>X</b>"))
    assert_self_contained(text)
    assert not details_open(text, "refused: the backend rejects") and "head_size &lt;80&gt;" in text
    assert "<b>X</b>" not in text and "What to fix first" not in text


@pytest.mark.parametrize(
    ("items", "outcome", "kind", "words"),
    [
        (["a[b]"], Outcome.PASSED, "good", "1 rule of x conforms"),
        (["a[b]", "a[c]"], Outcome.PASSED, "cool", "only 1 of 2 items ran"),
        (["a[b]"], Outcome.UNJUDGED, "cool", "none of the items could run here"),
        (["a[b]"], Outcome.FAILED, "bad", "x does not conform"),
    ],
)
def test_only_a_whole_run_is_green(items: list[str], outcome: Outcome, kind: str, words: str) -> None:
    """The verdict's box is green only if every item ran and none failed."""
    text = page(verdict(items, [Result("a[b]", "host", outcome)]))
    assert f'class="verdict {kind}"' in text and words in text


def test_stopped_run_has_its_reason() -> None:
    """A run without a verdict shows the reason."""
    text = page(judge(Suite.unopened("fake:X"), [], "its library cannot be loaded"))
    assert 'class="verdict cool"' in text and "its library cannot be loaded" in text
