"""Tests of the page tables for window layers with KV in SGLang's second pool."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftmark import AttentionShape, Geometry, Limits, Mode
from draftmark.runtime import BatchBuffers, Exact, ragged
from draftmark_sglang.prefixes import Prefixes
from draftmark_sglang.window_pool import WindowPool

PAGES = 12


@pytest.mark.parametrize("page_size", [1, 4])
def test_column_of_a_freed_page_names_the_null_page(page_size: int) -> None:
    """SGLang maps freed tokens to slot 0, so their columns name page 0 of the second pool, and never -1."""
    shape = AttentionShape(2, 1, 64, page_size, window_left=page_size)
    geometry = Geometry.create(shape, Limits(2, 9 * page_size), modes=(Mode.EXTEND, Mode.DECODE))
    buffers = BatchBuffers(geometry, "cpu")
    mapping = torch.zeros(PAGES * page_size + 1, dtype=torch.int64)
    mapping[-1] = -1  # SGLang's last entry, for slot -1
    full = torch.arange(3, 10)  # pages of the full pool; the window has left the first five
    for number, page in enumerate(full[5:].tolist()):
        mapping[page * page_size : (page + 1) * page_size] = (number + 1) * page_size + torch.arange(page_size)
    pool = SimpleNamespace(full_to_swa_index_mapping=mapping)
    window_pool = WindowPool(pool, Prefixes(buffers), page_size)
    table = torch.zeros(1, geometry.max_pages_per_req, dtype=torch.int32)
    table[0, : len(full)] = full
    lens = torch.tensor([6 * page_size], dtype=torch.int32)
    batch = ragged(geometry, lens, table, (page_size,), Exact((6 * page_size,)))
    found = window_pool.with_window_table(batch).page_table
    assert found[0, : len(full)].tolist() == [0, 0, 0, 0, 0, 1, 2]
    assert int(found.min()) >= 0
