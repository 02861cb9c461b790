"""The museum and the specification are what their data, the checks and the mutants say."""

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
    """A museum of one bug that no check or mutant names."""
    (folder / "museum.toml").write_text(BUG.format(more=more))
    return museum.museum(folder / "museum.toml")


def test_the_museum_is_what_its_data_says():
    """docs/museum.md equals the page that its data, the checks and the mutants make."""
    assert museum.PAGE.read_text() == museum.page(museum.museum()), "run: python -m tools.docs.museum"


def test_the_specification_is_what_the_checks_say():
    """The page of rules equals the page that the checks make."""
    page = specification.page(museum.museum())
    assert specification.PAGE.read_text() == page, "run: python -m tools.docs.specification"


def test_every_thread_stands_in_one_row():
    """No thread is collected twice under one class and symptom, and every row has its own anchor."""
    bugs = museum.museum().bugs
    assert len({bug.anchor for bug in bugs}) == len(bugs)
    assert len({(bug.kind, bug.threads) for bug in bugs}) == len(bugs)


def test_a_rule_is_named_or_a_reason_given(tmp_path):
    """A bug with neither is refused, and so is one with both."""
    with pytest.raises(ValueError, match=r"sglang#1 needs a rule \(by, mutants\) or a reason"):
        read(tmp_path, "")
    with pytest.raises(ValueError, match="and not both"):
        read(tmp_path, 'by = ["sizing.covers"]\nnone = "no tables here"')
    [bug] = read(tmp_path, 'none = "no tables here"').bugs
    assert not bug.killers and "none: no tables here" in museum.page(museum.Museum({"A": "a"}, {}, (bug,)))


def test_an_unknown_rule_or_mutant_is_refused(tmp_path):
    """An unknown name of a check or mutant is an error, so renamed checks cannot leave the museum stale."""
    for more in ('by = ["sizing.covered"]', 'mutants = ["M999"]'):
        with pytest.raises(ValueError, match="which no page of checks has"):
            read(tmp_path, more)


def test_a_mutants_killers_are_the_bugs(tmp_path):
    """A bug that names a mutant is killed by what kills that mutant."""
    [bug] = read(tmp_path, 'mutants = ["M01"]').bugs
    assert {rule.check.name for rule in bug.killers} == set(mutants()["M01"].killers) & set(rules())


def test_every_check_has_a_number():
    """Rule 1 is the first of draftmark_contract/rules.toml, and no two rules have one number."""
    numbers = [rule.number for rule in rules().values()]
    assert numbers == sorted(set(numbers)) and rules()["load.describes_itself"].number == 1
