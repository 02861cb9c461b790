"""The page stands alone, shows what failed with its batch, and draws what the backend declared."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from sizing_backends import changed, correct

from draftmark.buffers import Role
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier
from draftmark_contract.runner.item import Item, Result, all_items, run_item
from draftmark_contract.runner.report.html import page, write_page
from draftmark_contract.runner.report.sample import PARENTS, buffer_rows, depth, sample_geometry, sees
from draftmark_contract.runner.verdict import judge

VOID = {"meta", "circle", "path", "rect"}


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


def _items() -> list[Item]:
    wanted = ("sizing.covers_processors", "supports.mandatory_profile")
    return [item for item in all_items((Tier.SIZING,)) if item.check.name in wanted]


def _results(subject: BackendUnderTest) -> list[Result]:
    return [run_item(item, subject, []) for item in _items()]


@pytest.fixture(scope="module")
def failing() -> tuple[BackendUnderTest, str]:
    """The page of a backend whose indptr is too short."""
    subject = changed("csr_pages", Role.KV_INDPTR, lambda g: (g.limits.max_num_reqs + 1,))
    return subject, page(judge("sized", subject.backend, _results(subject)), subject)


def test_page_is_self_contained(failing: tuple[BackendUnderTest, str]) -> None:
    """No network, no script, no font, no path of the machine it was made on; well-formed."""
    text = failing[1]
    assert not re.search(r"https?://|src=|<link|<script|@import|url\(", text)
    assert str(Path(__file__).parents[3]) not in text
    parser = _Balanced()
    parser.feed(text)
    assert parser.open == []


def test_failures_come_with_their_batch(failing: tuple[BackendUnderTest, str]) -> None:
    """The first failure of each check is open, complete, and names the other cases."""
    text = failing[1]
    assert "does not keep the contract" in text
    assert "kv_indptr" in text and "got: 6, declared as" in text.replace("&#x27;", "'")
    assert "sglang#25124" in text
    assert "also: " in text


def test_messages_are_escaped(failing: tuple[BackendUnderTest, str]) -> None:
    """A plugin's text cannot become markup."""
    subject = failing[0]
    results = [
        Result("supports.mandatory_profile[small]", "sizing", _results(subject)[0].outcome, "<script>x</script>")
    ]
    assert "<script>" not in page(judge("sized", subject.backend, results), subject)


def test_conforming_backend_shows_its_buffers(tmp_path: Path) -> None:
    """Each buffer has a line with needed, declared and a bar; the page is written to a file."""
    subject = correct("csr_pages")
    write_page(judge("sized", subject.backend, _results(subject)), tmp_path / "report.html", subject)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    geometry = sample_geometry(subject)
    assert geometry is not None
    for row in buffer_rows(subject, geometry):
        assert row.name in text and f"{row.declared:,}" in text
        assert row.needed <= row.declared
    assert text.count("<svg") == len(buffer_rows(subject, geometry)) + 3


def test_drawn_tree_is_a_tree() -> None:
    """Parents come before children; every row sees its ancestors, itself and nothing else."""
    for row, parent in enumerate(PARENTS):
        assert parent < row
        assert [slot for slot in range(len(PARENTS)) if sees(row, slot)][-1] == row
        assert sum(sees(row, slot) for slot in range(len(PARENTS))) == depth(row) + 1
