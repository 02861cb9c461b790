"""Tests of the HTML report: self-contained, with six separate counts, and failures with their batch."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sizing_backends import changed
from verdicts import verdict

from draftmark.buffers import Role
from draftmark_contract.check import Tier
from draftmark_contract.profiles import Profile
from draftmark_contract.runner.item import all_items, run_item
from draftmark_contract.runner.judging import judge
from draftmark_contract.runner.outcome import Outcome, Result
from draftmark_contract.runner.report import page

VOID = {"meta"}


class _Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes nothing"


@pytest.fixture(scope="module")
def failing() -> str:
    """Return the page of a backend with a too short indptr."""
    subject = changed("csr_pages", Role.KV_INDPTR, lambda g: (g.limits.max_num_reqs + 1,))
    items = [item for item in all_items((Tier.SIZING,)) if item.check.name == "sizing.covers_processors"]
    return page(judge("sized", subject.backend, [run_item(item, subject, []) for item in items]))


def test_page_is_self_contained(failing: str) -> None:
    """The page is well-formed and has no network access, script, font or path of the machine."""
    assert not re.search(r"https?://|src=|<link|<script|@import|url\(", failing)
    assert str(Path(__file__).parents[3]) not in failing
    parser = _Balanced()
    parser.feed(failing)
    assert parser.open == []


def test_failures_have_their_batch(failing: str) -> None:
    """The first failure of each check is expanded, complete, and lists the other cases."""
    assert "sized does not conform to" in failing
    assert "kv_indptr" in failing and "got: 6, declared as" in failing.replace("&#x27;", "'")
    assert "sglang#25124" in failing and "run it again: " in failing
    assert "also: " in failing


def test_every_count_has_its_own_cell() -> None:
    """The page has a cell for each count of the verdict line."""
    ends = {Profile.FP8: Outcome.REFUSED, Profile.WINDOW: Outcome.DECLARED}
    judged = verdict(lambda item: next((ends[one] for one in ends if one in item.needs), None))
    text = page(judged)
    for word, count in {
        "passed": judged.counts.passed,
        "refused": judged.counts.refused,
        "declared": judged.counts.declared,
    }.items():
        assert f'<td>{word}</td><td class="n">{count:,}</td>' in text
    assert f'<td>not run</td><td class="n">{judged.counts.not_run:,}</td>' in text
    assert "conforms with known failures" in text


def test_messages_are_escaped() -> None:
    """A plugin's text is escaped and cannot become markup."""
    item = all_items()[0].id
    judged = verdict(
        lambda one: Result(item, "sizing", Outcome.FAILED, "<script>x</script>") if one.id == item else None
    )
    assert "<script>" not in page(judged)
