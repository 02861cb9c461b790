"""The prefix cache: requests share pages of equal prefixes, texts stay the same, and no page is lost."""

from __future__ import annotations

from itertools import product

import pytest

from draftmark_speculative import Adaptive, Eagle, Engine, EngineConfig, HostKind, decode
from draftmark_speculative.allocator import CacheExhausted, PageAllocator
from draftmark_speculative.prefix_cache import PrefixCache
from draftmark_speculative.request import Request
from draftmark_testing.pairs import quick

COUNT, STRENGTH, PAGE = 16, 0.01, 4
SMALL = {"page_size": PAGE, "max_num_reqs": 2, "max_context_len": 64, "max_extend_tokens": 20, "guard": True}


def waiting(request: int, tokens) -> Request:
    """Return a request that waits with these tokens."""
    return Request(request, tuple(tokens), 8, list(tokens))


class Small:
    """A cache of 9 pages, and requests that join it as a scheduler lets them."""

    def __init__(self, lookahead: int = 0, stateful: bool = False) -> None:
        self.released: list[int] = []
        self.pages = PageAllocator(10, 1)
        self.cache = PrefixCache(self.pages, PAGE, lookahead, stateful, self.released.append)
        self._requests = 0

    def join(self, tokens) -> tuple[Request, int]:
        """Let a request join and take its other pages."""
        request = waiting(self._requests, tokens)
        self._requests += 1
        reused = self.cache.join(request)
        shared = [node.page for node in request.shared]
        request.pages = shared + self.cache.take(-(-len(tokens) // PAGE) - len(shared))
        return request, reused

    def leave(self, request: Request) -> None:
        """Let a request leave with the KV of all its tokens but the last."""
        self.cache.store(request, len(request.tokens) - 1)
        self.pages.give(self.cache.private_pages(request))
        self.cache.leave(request)


def test_request_shares_whole_pages_of_an_equal_prefix():
    """A request shares the pages on which its tokens agree with an earlier request, and computes at least one token."""
    small = Small()
    first, reused = small.join(range(13))
    assert reused == 0
    small.leave(first)
    assert small.cache.unused_pages == 3 and small.pages.free == 6
    for tokens, wanted in ((range(13), 12), (range(12), 8), ([*range(8), 99, 10, 11, 12, 13], 8), (range(1, 14), 0)):
        request, reused = small.join(tokens)
        assert reused == wanted and request.pages[: wanted // PAGE] == first.pages[: wanted // PAGE]
        small.pages.give(small.cache.private_pages(request))
        small.cache.leave(request)


def test_running_requests_share_a_prefix_that_prefill_stored():
    """A request shares pages with one that still runs, and only the last user frees them."""
    small = Small()
    first, _ = small.join(range(9))
    small.cache.store(first, 9)
    second, reused = small.join([*range(8), 50])
    assert reused == 8
    small.leave(first)
    assert small.cache.unused_pages == 0, "the second request uses both pages"
    small.leave(second)
    assert small.cache.unused_pages == 2


def test_equal_pages_of_two_requests_are_kept_once():
    """If two requests store the same tokens, the cache keeps the first one's page and the other stays private."""
    small = Small()
    (first, _), (second, _) = small.join(range(9)), small.join(range(9))
    small.leave(first)
    small.leave(second)
    assert small.cache.unused_pages == 2 and small.pages.free == 7


def test_draft_heads_compare_one_token_more():
    """With a draft head a page is reused only if the token after it agrees, because the head's last row reads it."""
    small = Small(lookahead=1)
    small.leave(small.join(range(10))[0])
    assert small.join([*range(8), 50, 51])[1] == 4
    assert small.join(range(10))[1] == 8


def test_unused_pages_are_given_back_oldest_first():
    """A request that needs pages takes those of the prefix that was used last the longest time ago, leaves first."""
    small = Small()
    old, new = range(13), range(100, 113)
    for tokens in (old, new):
        small.leave(small.join(tokens)[0])
    assert (small.cache.unused_pages, small.pages.free) == (6, 3)
    other, _ = small.join(range(200, 216))
    assert small.join(old)[1] == 8, "the last page of the oldest prefix went first"
    with pytest.raises(CacheExhausted):
        small.cache.take(4)
    assert small.cache.unused_pages == 1, "a take that fails gives nothing back"
    assert len(other.pages) == 4


def test_stateful_requests_resume_at_a_checkpoint():
    """A model with recurrent state reuses a prefix up to its last checkpoint, and nothing without one."""
    small = Small(stateful=True)
    first, _ = small.join(range(14))
    small.leave(first)
    assert small.join(range(14))[1] == 0
    second, _ = small.join(range(50, 64))
    second.checkpoints = [(8, 3), (16, 4)]
    small.leave(second)
    assert second.checkpoints == [(16, 4)], "the page of this checkpoint is not full"
    third, reused = small.join(range(50, 64))
    assert reused == 8 and third.shared[-1].checkpoint == 3
    third.checkpoints = [(8, 5)]
    small.leave(third)
    assert small.released == [5], "one checkpoint a prefix is enough"


def test_checkpoint_slots_are_given_back_oldest_first():
    """Slots come back in the order of their last use, and with the page of their prefix."""
    small = Small(stateful=True)
    for first, slot in ((0, 3), (100, 4)):
        request, _ = small.join(range(first, first + 5))
        request.checkpoints = [(4, slot)]
        small.leave(request)
    small.leave(small.join(range(5))[0])
    assert small.cache.evict_checkpoint() and small.released == [4]
    small.cache.take(small.pages.free + 2)
    assert small.released == [4, 3] and not small.cache.evict_checkpoint() and small.cache.checkpoints == 0


COMMON = [(i * 7) % 256 for i in range(20)]
STARTS = [*([*COMMON, one, 3, one] for one in range(4)), COMMON[:11], COMMON]


@pytest.fixture(scope="module")
def texts(markov):
    """Texts of an engine without a cache."""
    return [one.tokens for one in decode(Engine(markov(STRENGTH)[0], EngineConfig(**SMALL)), STARTS, COUNT)]


WAYS = ("none", "known", "chain", "tree", "adaptive")
SETTINGS = quick(
    one for one in product(WAYS, [False, True], [False, True], [None, 18]) if not (one[2] and one[0] == "known")
)


@pytest.mark.parametrize(("way", "graph", "overlap", "num_pages"), SETTINGS)
def test_reused_prefixes_give_the_same_text(markov, oracle, table, texts, way, graph, overlap, num_pages):
    """Requests with a common prefix get the text of an engine without a cache, and no page is lost."""
    model, head = markov(STRENGTH)
    drafts = {
        "none": lambda: None,
        "known": lambda: oracle(3, 7, tuple(texts * 2)),
        "chain": lambda: Eagle(head, 1, 4, 5),
        "tree": lambda: Eagle(head, 4, 3, 12),
        "adaptive": lambda: Adaptive(Eagle(head, 4, 3, 12), (4, 24), table(0.04), 0.01),
    }[way]()
    host = HostKind.UPPER_BOUND if overlap else HostKind.EXACT
    settings = {"graph": graph, "overlap": overlap, "host_lengths": host, "num_pages": num_pages}
    config = EngineConfig(**SMALL, prefix_cache=True, speculate=drafts, **settings)
    engine = Engine(model, config)
    for _ in range(2):
        assert [one.tokens for one in decode(engine, STARTS, COUNT)] == texts
    cache = engine._scheduler._cache
    assert engine.statistics.reused >= 60, "the test needs reused prefixes"
    assert engine.pages.in_use == cache.unused_pages, "every page is free or an unused page of the cache"
    assert num_pages is None or engine.statistics.preemptions, "the test needs preempted requests"
