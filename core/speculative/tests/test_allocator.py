"""PageAllocator: one owner per page, no null page handed out, all pages or none."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark_speculative.allocator import CacheExhausted, PageAllocator


def test_exhausted_pool_takes_no_page():
    """A request for too many pages raises an error with the numbers and the remedy, and takes nothing."""
    pages = PageAllocator(num_pages=5, null_pages=1)
    pages.take(3)
    with pytest.raises(CacheExhausted, match="2 KV pages are needed, but 1 of 4 are free; finish or cancel"):
        pages.take(2)
    assert (pages.free, pages.in_use) == (1, 3)


def test_a_page_is_returned_once():
    """Returning a page twice, or returning a null page, raises an error."""
    pages = PageAllocator(num_pages=4, null_pages=2)
    mine = pages.take(2)
    pages.give(mine)
    with pytest.raises(ValueError, match="not owned"):
        pages.give(mine)
    with pytest.raises(ValueError, match="not owned"):
        pages.give([0])


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.integers(1, 3), st.integers(0, 12), st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_pages_have_one_owner(null_pages, usable, steps):
    """Under random takes and returns, owners are disjoint, null pages stay out, and free plus owned is everything."""
    pages = PageAllocator(null_pages + usable, null_pages)
    held: list[list[int]] = []
    for take, count in steps:
        if take:
            try:
                held.append(pages.take(count))
            except CacheExhausted:
                assert count > pages.free
        elif held:
            pages.give(held.pop(count % len(held)))
        owned = [page for group in held for page in group]
        assert len(owned) == len(set(owned)) == pages.in_use
        assert all(null_pages <= page < null_pages + usable for page in owned)
        assert pages.free + pages.in_use == usable
