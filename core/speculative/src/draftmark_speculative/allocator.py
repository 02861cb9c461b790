"""Allocator of the KV cache's pages, and the error of an exhausted cache."""

from __future__ import annotations

from collections.abc import Sequence

from draftmark import DraftmarkError


class CacheExhausted(DraftmarkError):
    """The page pool has fewer free pages than a reservation needs, or no state slot is free. Nothing was taken."""

    def __init__(self, needed: int, free: int, total: int, unit: str = "pages") -> None:
        self.needed = needed
        self.free = free
        self.total = total
        super().__init__(
            f"{needed} {'KV ' * (unit == 'pages')}{unit} are needed, but {free} of {total} are free; "
            f"finish or cancel a request, lower max_num_reqs, or give the cache more {unit}"
        )


class PageAllocator:
    """Allocates KV page ids and takes them back. The first `null_pages` ids are never allocated.

    `take` returns all requested pages or none, so an exhausted pool changes no state.
    """

    def __init__(self, num_pages: int, null_pages: int) -> None:
        self.null_pages = null_pages
        self.total = num_pages - null_pages
        self._free = list(range(num_pages - 1, null_pages - 1, -1))
        self._owned: set[int] = set()

    @property
    def free(self) -> int:
        """Number of pages that no request owns."""
        return len(self._free)

    @property
    def in_use(self) -> int:
        """Number of pages that requests own."""
        return len(self._owned)

    def take(self, count: int) -> list[int]:
        """Take `count` pages.

        Raises:
            CacheExhausted: fewer pages are free. No page was taken.
        """
        if count > len(self._free):
            raise CacheExhausted(count, len(self._free), self.total)
        pages = [self._free.pop() for _ in range(count)]
        self._owned.update(pages)
        return pages

    def give(self, pages: Sequence[int]) -> None:
        """Return pages. A page that is not owned raises ValueError: it is a bug of the caller."""
        for page in pages:
            if page not in self._owned:
                raise ValueError(f"page {page} is not owned; every page is returned once, by the request that took it")
            self._owned.remove(page)
            self._free.append(page)
