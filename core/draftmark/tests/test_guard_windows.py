"""Tests of guard mode for page-table columns left of a sliding window, after an engine gave their pages back."""

from __future__ import annotations

import pytest
import torch

from draftmark import AttentionShape, BatchError, Geometry, Limits, Mode, load
from draftmark.runtime import BatchBuffers, Exact, KVPool

LENGTH, HIDDEN = 21, 4
"""Committed tokens, and columns of 4 tokens that lie left of a window of 3."""


def attended(first_pages: list[int]) -> torch.Tensor:
    """Run a decode in guard mode with these pages in the columns left of the window; return its output."""
    shape = AttentionShape(2, 1, 64, page_size=4, window_left=3)
    geometry = Geometry.create(shape, Limits(1, 32), modes=(Mode.DECODE,))
    backend = load("reference").open(geometry, "cpu", guard=True)
    pool = KVPool(geometry, 2, 10, 1, "cpu")
    chance = torch.Generator().manual_seed(0)
    for one in (pool.k, pool.v):
        one.copy_(torch.randn(one.shape, generator=chance))
        one[:, 8] = float("nan")
    buffers = BatchBuffers(geometry, "cpu")
    batch = buffers.uniform(Mode.DECODE, 0, 1, 1, Exact((LENGTH,)), tree=False)
    batch.prefix_lens.fill_(LENGTH)
    batch.positions.fill_(LENGTH)
    batch.page_table[0, : HIDDEN + 2] = torch.tensor([*first_pages, 5, 6], dtype=torch.int32)
    q, k, v = (torch.ones(1, heads, 64, dtype=torch.bfloat16) for heads in (2, 1, 1))
    out = torch.empty_like(q)
    backend.plan(batch)
    backend.write_metadata(batch)
    backend.write_kv(k, v, pool.layers[1], batch)
    backend.attend(q, pool.layers[1], batch, out)
    return out


@pytest.mark.parametrize("pages", [[0] * HIDDEN, [8] * HIDDEN, [0, 8, 5, 6]])
def test_any_page_of_the_pool_may_stand_left_of_the_window(pages: list[int]) -> None:
    """The null page, a page of NaN and a page that is in use give the output of the request's own former pages."""
    assert torch.equal(attended(pages), attended([1, 2, 3, 4]))


def test_minus_one_left_of_the_window_raises() -> None:
    """-1 is no page, and the error says what to write when a page is given back."""
    with pytest.raises(BatchError, match=r"page_table\[0, 1\] is -1, left of the window .* null page 0"):
        attended([0, -1, 0, 0])


def test_page_past_the_pool_left_of_the_window_raises() -> None:
    """A backend may load the page, so its id must exist."""
    with pytest.raises(BatchError, match=r"page_table has page 10, but cache\.k has 10 pages"):
        attended([10, 0, 0, 0])
