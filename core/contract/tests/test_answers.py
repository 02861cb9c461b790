"""Tests of the comparison of sizing answers between processes."""

from __future__ import annotations

from typing import Any

import pytest

from draftmark import BufferSpec
from draftmark_contract.sizing.answers import difference, plain, questions


@pytest.mark.parametrize(
    ("here", "there", "where"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, (".a[1]", 2, 3)),
        ({"a": [1]}, {"a": [1, 2]}, (".a", [1], [1, 2])),
        ({"a": 1}, {"b": 1}, ("", {"a": 1}, {"b": 1})),
        ([1], [True], ("[0]", 1, True)),
        ({"a": [None, "x"]}, {"a": [None, "x"]}, None),
    ],
)
def test_first_difference_is_found(here: Any, there: Any, where: Any) -> None:
    """The path of the first differing value is returned with both values; types and the order of keys count."""
    assert difference(here, there) == where


def test_answers_become_plain_data() -> None:
    """A buffer specification becomes JSON data in which each field can be compared."""
    spec = BufferSpec("n", (3, 4), "int32", "f")
    found = plain([spec])[0]["BufferSpec"]
    assert found["shape"] == [3, 4]
    assert found["pinned"] is False


def test_questions_cover_all_modes_and_forms() -> None:
    """Hundreds of geometries are among the questions, with every mode and form."""
    assert len(questions()) > 300
    assert {mode.value for one in questions() for mode in one.modes} >= {"extend", "ragged_verify", "draft_block"}
    assert any(one.forms for one in questions())
