"""Tests of page tables that are computed from SGLang's token slots (`req_to_token`)."""

from __future__ import annotations

import pytest
import torch

from draftmark_sglang.page_table import as_pages, write_page_table


def _pool(page_size: int, width: int, requests: int = 5) -> torch.Tensor:
    """Return `req_to_token` as SGLang's paged allocator fills it: whole pages in random order; row 0 is zero."""
    make = torch.Generator().manual_seed(page_size)
    pages = -(-width // page_size)
    ids = 1 + torch.randperm(requests * pages, generator=make).view(requests, pages)
    slots = (ids[:, :, None] * page_size + torch.arange(page_size)).flatten(1)[:, :width]
    return torch.cat([torch.zeros(1, width), slots]).to(torch.int32)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_every_position_is_found(page_size: int) -> None:
    """Each position's page and offset give the KV slot that SGLang assigned, for several page sizes."""
    pool, rows = _pool(page_size, 130), torch.tensor([4, 1, 5])
    table = torch.full((3, -(-130 // page_size)), -7, dtype=torch.int32)
    write_page_table(table, pool, rows, page_size)
    positions = torch.arange(130)
    slots = table[:, positions // page_size] * page_size + positions % page_size
    assert torch.equal(slots, pool[rows])


def test_columns_past_the_row_are_null_pages() -> None:
    """Page table columns past the width of `req_to_token` are the null page (sglang#22778)."""
    table = torch.full((2, 9), -7, dtype=torch.int32)
    write_page_table(table, _pool(16, 100), torch.tensor([1, 2]), 16)
    assert bool((table[:, 7:] == 0).all()) and bool((table[:, :7] > 0).all())


def test_wider_row_is_truncated() -> None:
    """If a row of `req_to_token` is wider than the page table, the rest of the row is ignored."""
    table = torch.zeros(1, 4, dtype=torch.int32)
    write_page_table(table, _pool(16, 160), torch.tensor([3]), 16)
    assert table.shape == (1, 4) and bool((table > 0).all())


def test_padding_requests_have_null_pages() -> None:
    """Padding requests point at row 0 of `req_to_token`, so all their pages are the null page."""
    table = torch.full((2, 3), 9, dtype=torch.int32)
    write_page_table(table, _pool(64, 190), torch.tensor([0, 0]), 64)
    assert bool((table == 0).all())


def test_slot_pool_is_viewed_as_pages() -> None:
    """A KV pool viewed as pages shares the pool's memory, and slot s is at page s // P, offset s % P."""
    slots = torch.arange(3 * 4 * 2 * 5).view(12, 2, 5)
    pages = as_pages(slots, 4)
    assert pages.shape == (3, 4, 2, 5) and pages.data_ptr() == slots.data_ptr()
    assert torch.equal(pages[2, 3], slots[11])
