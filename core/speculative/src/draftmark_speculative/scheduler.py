"""Scheduling of requests on the host: admission, prefill order, page reservations, preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from draftmark import Geometry

from .allocator import CacheExhausted, PageAllocator
from .checkpoints import Checkpoints
from .prefix_cache import PrefixCache
from .request import Request
from .state import DeviceState
from .states import StateLayers


class Scheduler:
    """Holds the queues of waiting, prefilling and running requests; each request is in exactly one queue.

    When pages run out, the youngest running request returns its pages and its slot of recurrent state. It goes to the
    front of the waiting queue with all its tokens. A later prefill restores its KV and its state, from the prefix
    cache as far as possible, and its text does not change.

    Args:
        states: the target's layers with recurrent state; None without such layers.
        cache: None keeps nothing of a request that leaves.
        prompts_only: only pages that a prefill stored go to the cache. Adaptive drafting skips updates of the head's KV
            in rounds.

    Attributes:
        checkpoints: spare slots for checkpoints; None without layers with state or without a cache.
        reused: number of tokens that requests took from the prefix cache.
    """

    def __init__(
        self,
        geometry: Geometry,
        allocator: PageAllocator,
        state: DeviceState,
        states: StateLayers | None = None,
        cache: PrefixCache | None = None,
        prompts_only: bool = False,
    ) -> None:
        self._geometry = geometry
        self._allocator = allocator
        self._state = state
        self._states, self._cache, self._prompts_only = states, cache, prompts_only
        self.checkpoints = None if states is None or cache is None else Checkpoints(states, cache)
        self.reused = 0
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
            reused = 0 if self._cache is None else self._cache.join(request)
            shared = [node.page for node in request.shared]
            try:
                request.pages = shared + self._take(self._pages(len(request.tokens)) - len(shared))
            except CacheExhausted:
                if self._cache is not None:
                    self._cache.leave(request)
                return
            self.waiting.popleft()
            request.row = self._free_rows.pop()
            request.assignment += 1
            request.computed, request.prefilled = reused, 0
            self._state.assign_row(request, 0)
            if self._states is not None:
                self._states.slots.take(request.row)
            if reused:
                self._resume(request, reused)
            self.prefilling.append(request)

    def chunks(self) -> list[tuple[Request, int]]:
        """Return the next prefill: requests and token counts, oldest first, within max_extend_tokens."""
        left = self._geometry.limits.max_extend_tokens
        taken = []
        for request in self.prefilling:
            count = min(len(request.tokens) - request.computed, left)
            if self.checkpoints is not None:
                count = min(count, self.checkpoints.until(request.computed))
            if count:
                taken.append((request, count))
                left -= count
        return taken

    def prefilled(self, request: Request) -> None:
        """Move a request with all tokens stored from prefilling to running."""
        request.prefilled = request.computed
        self.prefilling.remove(request)
        self.running.append(request)
        self.store(request)

    def lend(self, requests: Sequence[Request]) -> None:
        """Lend each request a spare slot for the checkpoint of the next forward, if there are checkpoints."""
        if self.checkpoints is not None:
            for request in requests:
                self.checkpoints.lend(request, len(self._free_rows))

    def store(self, request: Request) -> None:
        """Keep the pages and checkpoints of a request with a row in the prefix cache, if there is one."""
        if self._cache is not None and request.row is not None:
            stored = request.prefilled or request.computed
            if request.prefilled and not self._prompts_only:
                stored = max(stored, len(request.tokens) - 1)
            self._cache.store(request, stored)

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
                request.pages += self._take(need - have)
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
        if self._cache is None:
            self._allocator.give(request.pages)
        else:
            self.store(request)
            self._allocator.give(self._cache.private_pages(request))
            self._cache.leave(request)
        request.pages = []
        self._state.lengths.reset(request.row)
        if self._states is not None:
            self._states.slots.give_back(request.row)
            for _, slot in request.checkpoints:
                self._states.slots.release(slot)
            request.checkpoints = []
        self._free_rows.append(request.row)
        request.row = None

    def _take(self, count: int) -> list[int]:
        return self._allocator.take(count) if self._cache is None else self._cache.take(count)

    def _resume(self, request: Request, count: int) -> None:
        """Start a request after `count` tokens of the prefix cache: length, and recurrent state if there is one."""
        assert request.row is not None, "admit gives a row"
        self.reused += count
        self._state.resume(request.row, count)
        checkpoint = request.shared[-1].checkpoint
        if self._states is not None and checkpoint is not None:
            self._states.resume(request.row, checkpoint)

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
