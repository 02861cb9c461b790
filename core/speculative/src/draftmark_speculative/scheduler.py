"""Scheduling of requests on the host: admission, prefill order, page reservations, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from draftmark import CacheExhausted, Geometry

from .allocator import PageAllocator
from .request import Request
from .state import DeviceState


class Scheduler:
    """Holds the queues of waiting, prefilling and running requests; each request is in exactly one queue.

    When pages run out, the youngest running request returns its pages. It goes to the front of the waiting queue with
    all its tokens. A later prefill restores its KV, and its text does not change.
    """

    def __init__(self, geometry: Geometry, allocator: PageAllocator, state: DeviceState) -> None:
        self._geometry = geometry
        self._allocator = allocator
        self._state = state
        self._free_rows = list(range(geometry.limits.max_num_reqs - 1, -1, -1))
        self.waiting: deque[Request] = deque()
        self.prefilling: list[Request] = []
        self.running: list[Request] = []

    @property
    def busy(self) -> bool:
        """True if any request is not finished."""
        return bool(self.waiting or self.prefilling or self.running)

    def pages_at_worst(self, total_tokens: int) -> int:
        """Return the most pages that a request of `total_tokens` needs, if the host's lengths lag by one round."""
        grown = min(total_tokens + self._geometry.draft.num_draft_tokens, self._geometry.max_prefix_len)
        pages: int = self._geometry.pages_for(grown, self._geometry.max_tail)
        return pages

    def admit(self) -> None:
        """Give rows and pages to waiting requests, in order, until rows or pages run out."""
        while self.waiting and self._free_rows:
            request = self.waiting[0]
            try:
                request.pages = self._allocator.take(self._pages(len(request.tokens)))
            except CacheExhausted:
                return
            self.waiting.popleft()
            request.row = self._free_rows.pop()
            request.assignment += 1
            request.computed = 0
            self._state.assign_row(request, 0)
            self.prefilling.append(request)

    def chunks(self) -> list[tuple[Request, int]]:
        """Return the next prefill: requests and token counts, oldest first, within max_extend_tokens."""
        left = self._geometry.limits.max_extend_tokens
        taken = []
        for request in self.prefilling:
            count = min(len(request.tokens) - request.computed, left)
            if count:
                taken.append((request, count))
                left -= count
        return taken

    def prefilled(self, request: Request) -> None:
        """Move a request with all tokens stored from prefilling to running."""
        self.prefilling.remove(request)
        self.running.append(request)

    def reserve(self, prefix_lens: Sequence[tuple[Request, int]]) -> list[Request]:
        """Reserve pages for each request's prefix and tail; preempt requests if pages run out.

        Args:
            prefix_lens: running requests, each with an upper bound of its length on the device.

        Returns:
            The requests that still run.
        """
        for request, prefix_len in prefix_lens:
            while request.row is not None and not self._grow(request, prefix_len):
                self._preempt(self.running[-1])
        return [request for request, _ in prefix_lens if request.row is not None]

    def release(self, request: Request) -> None:
        """Remove a request for good, in any state, and free its row and pages."""
        for place in (self.waiting, self.prefilling, self.running):
            if request in place:
                place.remove(request)
        self._free(request)

    def _grow(self, request: Request, prefix_len: int) -> bool:
        have, need = len(request.pages), self._pages(prefix_len)
        if need > have:
            try:
                request.pages += self._allocator.take(need - have)
            except CacheExhausted:
                return False
            self._state.assign_row(request, have)
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._free(request)
        self.waiting.appendleft(request)

    def _free(self, request: Request) -> None:
        if request.row is None:
            return
        self._allocator.give(request.pages)
        request.pages = []
        self._state.lengths.reset(request.row)
        self._free_rows.append(request.row)
        request.row = None

    def _pages(self, prefix_len: int) -> int:
        pages: int = self._geometry.pages_for(prefix_len, self._geometry.max_tail)
        return pages


def by_row(requests: Sequence[Request]) -> list[int]:
    """Return the device rows of requests that have one."""
    rows = []
    for request in requests:
        assert request.row is not None, f"request {request.id} has no row"
        rows.append(request.row)
    return rows
