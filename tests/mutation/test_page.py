"""Tests of scores, reviews and the page: counts of mutants by result, and the parts of other targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.mutation import page
from tools.mutation.judge import Ended, Status
from tools.mutation.mutation import mutations
from tools.mutation.review import Kind, Review, reviews
from tools.mutation.score import complaints, score
from tools.mutation.targets import TARGETS

MADE = mutations("m", "def f(a, b):\n    return a + b\n\n\ndef g(a):\n    return not a\n")
STATUSES = dict(
    zip([one.id for one in MADE], [Status.KILLED, Status.STILLBORN, Status.SURVIVED, Status.HUNG], strict=True)
)
ENDED = {
    name: Ended(name, status, "check.one[case]" if status is Status.KILLED else "") for name, status in STATUSES.items()
}
(SURVIVOR,) = [name for name, status in STATUSES.items() if status is Status.SURVIVED]
"""Four mutants: one killed, one stillborn, one alive, one hung."""


@pytest.mark.parametrize(
    ("kind", "reviewed"),
    [
        (None, 2 / 3),
        (Kind.HOLE, 2 / 3),
        (Kind.OUT_OF_REACH, 2 / 3),
        (Kind.COST, 1),
        (Kind.EQUIVALENT, 1),
        (Kind.NARROWER, 1),
    ],
)
def test_score(kind: Kind | None, reviewed: float) -> None:
    """Mutants that do not load do not count. A review removes only survivors with correct results from the score."""
    one = score(MADE, ENDED, {} if kind is None else {SURVIVOR: Review(kind, "why")})
    assert (one.made, one.judged, one.stillborn, one.killed, one.survived) == (4, 4, 1, 2, 1)
    assert (one.raw, one.reviewed) == (pytest.approx(2 / 3), pytest.approx(reviewed))


def test_a_run_fails_on_a_survivor_without_a_review() -> None:
    """The complaint about a survivor without a review shows its change."""
    (wrong,) = complaints(MADE, ENDED, {})
    assert SURVIVOR in wrong and "→" in wrong
    assert complaints(MADE, ENDED, {SURVIVOR: Review(Kind.COST, "why")}) == []


def test_a_run_fails_on_an_outdated_review() -> None:
    """A review of a mutant that is killed or no longer made gives a complaint."""
    review = Review(Kind.EQUIVALENT, "why")
    wrong = complaints(MADE, ENDED, {SURVIVOR: review, MADE[0].id: review, "m.f/gone-123456": review})
    assert len(wrong) == 2
    assert "killed" in next(one for one in wrong if MADE[0].id in one)


def test_reviews_are_read(tmp_path: Path) -> None:
    """An entry of reviewed.toml gives its kind to all mutants that it names. A second entry for a mutant raises."""
    file = tmp_path / "reviewed.toml"
    entry = '[[survivor]]\ntarget = "t"\nkind = "cost"\nmutants = ["a", "b"]\nreason = """one\n  reason"""\n'
    file.write_text(entry + entry.replace('"t"', '"u"'))
    assert reviews("t", file) == {name: Review(Kind.COST, "one reason") for name in "ab"}
    file.write_text(entry + entry)
    with pytest.raises(ValueError, match="reviews a of t twice"):
        reviews("t", file)


@pytest.mark.parametrize("name", TARGETS)
def test_every_reviewed_mutant_is_still_made(name: str) -> None:
    """Every id in reviewed.toml is an id of a mutant of today's source."""
    made = {one.id for one in TARGETS[name].mutations()}
    assert not set(reviews(name)) - made


def test_a_run_keeps_other_targets_results(tmp_path: Path) -> None:
    """A run replaces the results of its own target and keeps the others."""
    path = tmp_path / "results.json"
    page.record(path, "one", MADE, ENDED, {}, "contract 1.0")
    first = page.page(path)
    page.record(path, "two", MADE, {}, {}, "contract 1.1")
    page.record(path, "two", MADE, ENDED, {SURVIVOR: Review(Kind.HOLE, "a reason")}, "contract 1.2")
    text = page.page(path)
    assert text.startswith(first.rstrip())
    assert text.count("## Target") == 2 and "contract 1.1" not in text
    assert (
        "2 of 3 killed, 1 survived (1 hole). Raw score 66.7 %" in text
        and "a reason" in text
        and "**not reviewed**" in text
    )


def test_the_page_counts_drawn_and_judged_mutants(tmp_path: Path) -> None:
    """The page states how many mutants were made, drawn and judged."""
    path, some = tmp_path / "results.json", dict(list(ENDED.items())[:2])
    page.record(path, "one", MADE, some, {}, "contract 1.0", made=9)
    text = page.page(path)
    assert "9 mutants made; 4 of them drawn, evenly over the files; 2 judged: 1 stillborn, 1 of 1 killed" in text


def test_the_recorded_results_make_a_page() -> None:
    """results.json has a part for `reference`, and the page shows each survivor."""
    text = page.page()
    assert "## Target `reference`" in text and text.count("### Survivors") == text.count("## Target")
