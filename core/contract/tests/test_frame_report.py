"""Tests of the HTML report: self-contained, six separate counts, the first thing to fix, and the map of profiles."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import assert_fits, assert_self_contained, details_open, wrong_cells
from verdicts import judge, verdict

from draftmark import Geometry, LoadedBackend
from draftmark.geometry import Mode
from draftmark.runtime import Arena, AttentionBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier
from draftmark_contract.profiles import Profile
from draftmark_contract.roles import Role
from draftmark_contract.runner.item import all_items, run_item
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.page import page
from draftmark_reference import ReferencePlugin
from draftmark_testing.sizing_backends import changed


class WrongRow(ReferencePlugin):
    """Reference backend that multiplies row 3 of each verify step by 1.5."""

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        backend: Any = super().open_backend(geometry, arena)
        right = backend.attend

        def attend(q: Any, cache: Any, batch: Any, out: Any) -> None:
            right(q, cache, batch, out)
            if batch.mode is Mode.VERIFY and out.shape[0] > 3:
                out[3] *= 1.5

        backend.attend = attend
        return backend


@pytest.fixture(scope="module")
def short_buffer() -> str:
    """Return the page for a backend that declares a too short indptr."""
    subject = changed("csr_pages", Role.KV_INDPTR, lambda g: (g.limits.max_num_reqs + 1,))
    items = [item for item in all_items((Tier.SIZING,)) if item.check.name == "sizing.covers_processors"]
    return page(judge(subject.backend, [run_item(item, subject, []) for item in items]))


@pytest.fixture(scope="module")
def wrong_row() -> str:
    """Return the page for a backend with one wrong output row, from numerics and graph items of one geometry."""
    backend = LoadedBackend("reference", WrongRow())
    names = ("numerics.match_float64[fp32-gqa4-64-verify]", "graphs.replay_equals_eager[target-page128-verify]")
    items = [one for one in all_items((Tier.HOST,)) if one.id in names]
    assert len(items) == 2
    results = [run_item(item, BackendUnderTest(backend, "cpu", Tier.HOST), []) for item in items[::-1]]
    return page(judge(backend, results))


def test_page_is_self_contained(short_buffer: str, wrong_row: str) -> None:
    """The page is well-formed, loads nothing from a network, has no script or font, and names no local path."""
    for text in (short_buffer, wrong_row):
        assert_self_contained(text)
        assert str(Path(__file__).parents[3]) not in text


def test_page_has_no_sideways_scroll(short_buffer: str, wrong_row: str) -> None:
    """Nothing on a page is wider than its window, whatever the names and messages of a plugin are."""
    item, message = all_items()[0].id, f"RuntimeError: {'x' * 400}\n  got: {'y' * 400}"
    ends = {Outcome.FAILED: {item}, Outcome.REFUSED: {one.id for one in all_items() if Profile.SINKS in one.needs}}
    judged = verdict(
        lambda one: next((Result(one.id, one.tier.value, o, message) for o, ids in ends.items() if one.id in ids), None)
    )
    for text in (short_buffer, wrong_row, page(replace(judged, backend="z" * 200))):
        assert_fits(text)


def test_first_failure_has_its_batch_and_its_command(short_buffer: str) -> None:
    """The first failed check is unfolded, with both values, the drawing, the other failed cases and the command."""
    assert "sized does not conform to" in short_buffer
    assert details_open(short_buffer, "1. sizing.covers_processors")
    text = short_buffer.replace("&#x27;", "'")
    assert "kv_indptr" in text and "6, declared as" in text and "sglang#25124" in text
    assert "too few entries" in wrong_cells(short_buffer)[0]
    assert re.search(r'<pre class="run">draftmark contract sized --item \'sizing.covers_processors\[', text)
    assert not details_open(short_buffer, "other failed cases") and not details_open(short_buffer, "the full message")


def test_failures_stand_in_the_order_of_learning(wrong_row: str) -> None:
    """Numerics failures come before graph failures whatever ran first; only the first failure is unfolded."""
    assert details_open(wrong_row, "1. numerics.match_float64")
    assert not details_open(wrong_row, "2. graphs.replay_equals_eager")


def test_drawing_marks_the_wrong_row(wrong_row: str) -> None:
    """The drawing of a wrong output marks row 3 of request 0 and no other row."""
    assert set(wrong_cells(wrong_row)) == {"row 3: wrong output"}


def test_every_count_has_its_own_tile() -> None:
    """The page shows each count of the verdict line in a box of its own."""
    ends = {Profile.FP8: Outcome.REFUSED, Profile.WINDOW: Outcome.DECLARED}
    judged = verdict(lambda item: next((ends[one] for one in ends if one in item.needs), None))
    text = page(judged)
    for name in ("passed", "refused", "declared", "not_run"):
        assert f"<b>{getattr(judged.counts, name):,}</b> {name.replace('_', ' ')}" in text
    assert "conforms with known failures" in text


def test_map_counts_each_profile_and_tier() -> None:
    """A cell of the map has the color of its most serious outcome, and the number of items with each outcome."""
    failed = next(one for one in all_items((Tier.HOST,)) if Profile.WINDOW in one.needs)
    judged = verdict(
        lambda item: (
            Outcome.FAILED if item.id == failed.id else Outcome.REFUSED if Profile.OVERLAP in item.needs else None
        )
    )
    text = page(judged)
    of = {tier: sum(Profile.WINDOW in one.needs for one in all_items((tier,))) for tier in Tier}
    window = text[text.index("<th>window") :].partition("</tr>")[0]
    kinds = re.findall(r'<td class="(\w+)"><b>([\d,]+) ([\w ]+)</b>', window)
    assert [kind for kind, _, _ in kinds][1:] == ["bad", "none"] and kinds[0][0] in ("good", "cool")
    assert kinds[1][1:] == ("1", "failed") and kinds[2][1:] == (f"{of[Tier.DEVICE]:,}", "not run")
    assert "not served in full" in window


def test_few_items_serve_no_profile_in_full() -> None:
    """After a run of one item, the page names no profile as served, and the map counts all other items as not run."""
    item = all_items((Tier.SIZING,))[0]
    subject = BackendUnderTest(LoadedBackend("reference", ReferencePlugin()), "cpu", Tier.SIZING)
    text = page(judge(subject.backend, [run_item(item, subject, [])]))
    assert "served in full" not in text and "has no verdict" in text
    core = text[text.index("<th>core") :].partition("</tr>")[0]
    assert "1 passed" in core and "not run" in core


def test_refusals_are_folded_by_reason() -> None:
    """Refused items are in a folded section with one row per reason: the number of items and their checks."""
    judged = verdict(lambda item: Outcome.REFUSED if Profile.SINKS in item.needs else None)
    text = page(judged)
    assert not details_open(text, "refused: the backend rejects the input")
    folded = text[text.index("refused: the backend") :].partition("</details>")[0]
    assert f"{judged.counts.refused:,}" in folded and "why" in folded and "sinks.take_their_share (" in folded


def test_names_and_messages_are_escaped() -> None:
    """HTML in a plugin's name or messages is escaped, so it is shown as text."""
    item = all_items()[0].id
    evil = "<script>x</script>\n<b onclick=x>what</b>\n  got: <i>1</i>\n  run it again: <u>"
    judged = verdict(lambda one: Result(item, "sizing", Outcome.FAILED, evil) if one.id == item else None)
    text = page(replace(judged, backend="<img src=x>"))
    assert_self_contained(text.replace("src=", "").replace("onclick", ""))
    for tag in ("<script", "<b onclick", "<i>1", "<u>", "<img"):
        assert tag not in text
