"""Reuse of prefixes: KV pages and checkpoints of recurrent states that outlive the request that wrote them.

Pages of a prefix form a tree: the path from the root to a node spells the tokens of whole pages. A request that joins
follows the tree as far as its own tokens agree, and shares these pages. A model with recurrent state resumes only where
a checkpoint of its state lies on the path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .allocator import PageAllocator
from .request import CachedPage, Request


class PrefixCache:
    """Holds the pages and checkpoints of prefixes, and gives them back in the order of their last use.

    Attributes:
        lookahead: tokens after a page that must agree too: the last row of a draft head in a page reads one more.

    Args:
        allocator: owner of all pages. The cache keeps pages that requests took from it.
        page_size: tokens of a page.
        stateful: the model has recurrent state.
        release_slot: frees the slot of a checkpoint.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        page_size: int,
        lookahead: int,
        stateful: bool,
        release_slot: Callable[[int], None],
    ) -> None:
        self.lookahead = lookahead
        self._allocator, self._page_size = allocator, page_size
        self._stateful, self._release_slot = stateful, release_slot
        self._root = CachedPage()
        # Both are in the order of the last use. A page without users comes after its children, which have none either.
        self._unused: dict[CachedPage, None] = {}
        self._checkpoints: dict[CachedPage, None] = {}

    @property
    def unused_pages(self) -> int:
        """Number of pages that the cache can give back now."""
        return len(self._unused)

    @property
    def checkpoints(self) -> int:
        """Number of checkpoints in the cache."""
        return len(self._checkpoints)

    # -- requests -----------------------------------------------------------------------------------------

    def join(self, request: Request) -> int:
        """Share the longest usable prefix with a request; return its number of tokens, a multiple of page_size.

        At least one token of the request stays to be computed. The request shares the pages until `leave`.
        """
        found = self._path(request.tokens)
        if self._stateful:
            while found and found[-1].checkpoint is None:
                found.pop()
        for node in found:
            self._use(node)
        if found and self._stateful:
            self._checkpoints.pop(found[-1], None)
            self._checkpoints[found[-1]] = None
        request.shared = found
        return len(found) * self._page_size

    def leave(self, request: Request) -> None:
        """Stop sharing the request's prefix."""
        for node in reversed(request.shared):
            node.users -= 1
            if not node.users:
                self._unused[node] = None
        request.shared = []

    def store(self, request: Request, count: int) -> None:
        """Keep a request's full pages, which hold the KV of its first `count` tokens, and its checkpoints.

        The request shares these pages from now on. If another request stored the same tokens first, that page is kept
        and this request's own page stays private.
        """
        tokens = request.tokens
        full = min(count, len(tokens) - self.lookahead) // self._page_size
        for index in range(len(request.shared), full):
            parent, key = request.shared[-1] if request.shared else self._root, self._key(tokens, index)
            if key not in parent.children:
                parent.children[key] = CachedPage(key, request.pages[index], parent)
            self._use(parent.children[key])
            request.shared.append(parent.children[key])
        later = []
        for length, slot in request.checkpoints:
            if length > len(request.shared) * self._page_size:
                later.append((length, slot))
                continue
            node = request.shared[length // self._page_size - 1]
            if node.checkpoint is None:
                node.checkpoint, self._checkpoints[node] = slot, None
            else:
                self._release_slot(slot)
        request.checkpoints = later

    def private_pages(self, request: Request) -> list[int]:
        """Return the request's pages that the cache does not own."""
        shared = [node.page for node in request.shared]
        shared += [-1] * (len(request.pages) - len(shared))
        return [page for page, other in zip(request.pages, shared, strict=True) if page != other]

    # -- memory -------------------------------------------------------------------------------------------

    def take(self, count: int) -> list[int]:
        """Take pages from the allocator; if too few are free, give back unused pages of the cache first.

        Raises:
            CacheExhausted: too few pages are free and unused. Nothing changed.
        """
        short = count - self._allocator.free
        if short <= len(self._unused):
            for _ in range(short):
                self._evict()
        return self._allocator.take(count)

    def evict_checkpoint(self) -> bool:
        """Free the slot of the least recently used checkpoint; return False if there is none."""
        if not self._checkpoints:
            return False
        self._drop_checkpoint(next(iter(self._checkpoints)))
        return True

    def _evict(self) -> None:
        node = next(iter(self._unused))
        assert node.parent is not None and not node.children, "children of an unused page are evicted before it"
        del self._unused[node], node.parent.children[node.key]
        self._drop_checkpoint(node)
        self._allocator.give([node.page])

    def _drop_checkpoint(self, node: CachedPage) -> None:
        if node.checkpoint is not None:
            self._release_slot(node.checkpoint)
            node.checkpoint = None
            del self._checkpoints[node]

    def _use(self, node: CachedPage) -> None:
        node.users += 1
        self._unused.pop(node, None)

    def _path(self, tokens: Sequence[int]) -> list[CachedPage]:
        """Return the nodes of the longest known prefix that leaves at least one token."""
        found: list[CachedPage] = []
        node: CachedPage | None = self._root
        for index in range((len(tokens) - 1) // self._page_size):
            node = node.children.get(self._key(tokens, index)) if node else None
            if node is None:
                break
            found.append(node)
        return found

    def _key(self, tokens: Sequence[int], index: int) -> tuple[int, ...]:
        first = index * self._page_size
        return tuple(tokens[first : first + self._page_size + self.lookahead])
