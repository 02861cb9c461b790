"""How a step is cut."""

from __future__ import annotations

from itertools import accumulate

import pytest

from draftmark import Mode
from draftmark_vllm.spans import Span, spans


def cut(lens: list[int], *, padding: int = 0, num_rows: int | None = None, verify: int = 5, ragged: bool = True):
    """Of requests with these rows, and as many padding ones."""
    start = [*accumulate(lens, initial=0)]
    start += [start[-1]] * padding
    return list(spans(tuple(start), start[-1] if num_rows is None else num_rows, verify, ragged))


def test_steps_that_are_cut_alike_are_cut_once() -> None:
    """Even steps come again and again: the same numbers give the same object, which nobody can change."""
    again = [spans((0, 5, 10), 10, 5, True) for _ in range(2)]
    assert again[0] is again[1] and isinstance(again[0], tuple)


def test_decodes_are_one_span() -> None:
    """One row a request."""
    assert cut([1, 1, 1]) == [Span(Mode.DECODE, 0, 0, 3, (1, 1, 1))]


def test_verifies_are_one_span() -> None:
    """As many rows a request as a verify brings."""
    assert cut([5, 5]) == [Span(Mode.VERIFY, 0, 0, 2, (5, 5))]


def test_uneven_rows_are_one_ragged_span() -> None:
    """Any number of rows up to a verify's."""
    assert cut([5, 1, 2]) == [Span(Mode.RAGGED_VERIFY, 0, 0, 3, (5, 1, 2))]


def test_uneven_rows_extend_where_the_backend_lacks_ragged_verify() -> None:
    """Leading decodes stay decodes."""
    assert cut([1, 1, 3, 1], ragged=False) == [
        Span(Mode.DECODE, 0, 0, 2, (1, 1)),
        Span(Mode.EXTEND, 2, 2, 2, (3, 1)),
    ]
    assert cut([3, 1], ragged=False) == [Span(Mode.EXTEND, 0, 0, 2, (3, 1))]


def test_a_mixed_step_is_two_spans() -> None:
    """Few rows first, then chunks, whatever the rows of later ones."""
    assert cut([5, 5, 30, 2]) == [Span(Mode.VERIFY, 0, 0, 2, (5, 5)), Span(Mode.EXTEND, 2, 10, 2, (30, 2))]
    assert [one.mode for one in cut([1, 4, 64])] == [Mode.RAGGED_VERIFY, Mode.EXTEND]


@pytest.mark.parametrize(("rows", "mode"), [(1, Mode.DECODE), (5, Mode.VERIFY)])
def test_padding_of_a_full_graph_gets_its_rows_back(rows: int, mode: Mode) -> None:
    """vLLM gives padding requests no rows, but the graph runs as many for each."""
    assert cut([rows] * 3, padding=5, num_rows=8 * rows) == [Span(mode, 0, 0, 3, (rows,) * 8)]


def test_padding_without_rows_is_left_out() -> None:
    """A step that is not padded to whole requests has its live requests alone."""
    assert cut([1, 1], padding=2, num_rows=2) == [Span(Mode.DECODE, 0, 0, 2, (1, 1))]
    assert cut([30], padding=2) == [Span(Mode.EXTEND, 0, 0, 1, (30,))]


def test_surplus_rows_of_a_captured_size_belong_to_nobody() -> None:
    """Rows behind the last request's are in no span."""
    (one,) = cut([5, 2], num_rows=16)
    assert one.num_rows == 7


def test_a_step_without_rows_has_no_span() -> None:
    """As a rank that idles runs it."""
    assert cut([], padding=2) == []


def test_without_drafts_a_chunk_of_one_row_decodes() -> None:
    """And every longer one extends."""
    assert [one.mode for one in cut([1, 1, 2], verify=1)] == [Mode.DECODE, Mode.EXTEND]
