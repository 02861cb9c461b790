"""Tests of docs/museum.md (public bugs of other projects) and of the specification: both pages equal their data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.docs import museum, specification
from tools.docs.kills import mutants, rules

BUG = """
repositories = {{ sglang = "sgl-project/sglang" }}
[classes]
A = "Undersized buffers"
[[bug]]
class = "A"
threads = ["sglang#1"]
status = "open"
mechanism = "A row is short."
rule = "long enough"
{more}
"""


def read(folder: Path, more: str) -> museum.Museum:
    """Return a museum of one bug without rule or mutant; `more` adds lines to the bug's data."""
    (folder / "museum.toml").write_text(BUG.format(more=more))
    return museum.museum(folder / "museum.toml")


def test_museum_equals_its_data():
    """docs/museum.md equals the page made from its data, the checks and the mutants."""
    assert museum.PAGE.read_text() == museum.page(museum.museum()), "run: python -m tools.docs.museum"


def test_specification_equals_the_checks():
    """The specification page equals the page made from the contract's checks."""
    page = specification.page(museum.museum())
    assert specification.PAGE.read_text() == page, "run: python -m tools.docs.specification"


def test_every_row_has_its_own_anchor():
    """No two bugs have equal class and threads, and every row has its own anchor."""
    bugs = museum.museum().bugs
    assert len({bug.anchor for bug in bugs}) == len(bugs)
    assert len({(bug.kind, bug.threads) for bug in bugs}) == len(bugs)


def test_bug_needs_a_rule_or_a_reason(tmp_path):
    """A bug must have either a rule that catches it or a reason why no rule can; neither and both are errors."""
    with pytest.raises(ValueError, match=r"sglang#1 needs a rule \(by, mutants\) or a reason"):
        read(tmp_path, "")
    with pytest.raises(ValueError, match="and not both"):
        read(tmp_path, 'by = ["sizing.covers"]\nnone = "no tables here"')
    [bug] = read(tmp_path, 'none = "no tables here"').bugs
    assert not bug.killers and "none: no tables here" in museum.page(museum.Museum({"A": "a"}, {}, (bug,)))


def test_unknown_rule_or_mutant_is_refused(tmp_path):
    """A bug that names an unknown check or mutant is an error, so a renamed check cannot leave the page stale."""
    for more in ('by = ["sizing.covered"]', 'mutants = ["M999"]'):
        with pytest.raises(ValueError, match="which no page of checks has"):
            read(tmp_path, more)


def test_bug_has_the_killers_of_its_mutant(tmp_path):
    """If a bug names a mutant, the rules that fail on that mutant are rules of the bug."""
    [bug] = read(tmp_path, 'mutants = ["M01"]').bugs
    assert {rule.check.name for rule in bug.killers} == set(mutants()["M01"].killers) & set(rules())


def test_every_check_has_a_number():
    """Rule 1 is the first rule of draftmark_contract/rules.toml, and no two rules have the same number."""
    numbers = [rule.number for rule in rules().values()]
    assert numbers == sorted(set(numbers)) and rules()["load.describes_itself"].number == 1
