"""Tests of the comparison of KV pools as integers, whatever their strides are."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.harness.pools import words

WHOLE = torch.zeros(4, 6, 8, dtype=torch.float16)
VIEWS = {
    "contiguous": (WHOLE, torch.int64),
    "rows of eight bytes": (WHOLE[:, 1:, 4:], torch.int64),
    "short rows": (WHOLE[..., :6], torch.int16),
    "odd offset": (WHOLE.flatten()[1:161].view(4, 5, 8), torch.int16),
    "odd stride": (torch.zeros(4, 5, 9, dtype=torch.float16)[..., :8], torch.int16),
    "columns": (WHOLE.transpose(1, 2), torch.int16),
}


@pytest.mark.parametrize("name", VIEWS)
def test_memory_is_read_as_the_widest_integers(name: str) -> None:
    """A view has 64-bit integers only if each row is whole ones, and two views are read alike; NaN equals itself."""
    view, dtype = VIEWS[name]
    view.fill_(float("nan"))
    (found,) = words(view)
    assert found.dtype == dtype
    one, other = words(view, view.clone(memory_format=torch.contiguous_format))
    assert one.dtype == other.dtype == dtype and torch.equal(one, other)
