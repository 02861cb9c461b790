"""Tests that each class of defects has enough mutants, in enough designs, by enough authors."""

from __future__ import annotations

import pytest

from . import catalog
from .classes import CLASSES, class_of, table

ROWS = table()


@pytest.mark.parametrize("letter", CLASSES)
def test_class_has_mutants_of_other_designs_and_authors(letter: str) -> None:
    """A class has at least three mutants by authors who had read no check, half of them only in other designs."""
    row = ROWS[letter]
    assert len(row.outside) >= 3
    assert 2 * sum(one in row.elsewhere for one in row.outside) >= len(row.outside)
    assert set(row.survivors) <= set(catalog.SURVIVORS)


def test_every_mutant_by_class_has_a_known_class() -> None:
    """Every mutant that was written by class is counted, and the letter names a class."""
    assert all(class_of(one) in CLASSES for one in catalog.MUTANTS if one.id[0] == "O")
