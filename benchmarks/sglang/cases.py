"""The servers to measure (`SERVERS`), each at several points: (number of requests, prompt tokens).

A model with dummy weights would accept no draft. So SGLang simulates acceptance: `SGLANG_SIMULATE_ACC_LEN` fixes the
tokens that a verification commits, for chains and trees. The number is equal for all backends, so rows differ only by
the cost of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

POINTS = ((1, 1024), (64, 1024), (8, 8192), (16, 1024), (1, 32768))
LONG = (*POINTS, (1, 8192), (64, 8192))
FEW = ((1, 1024), (64, 1024))
PREFILLS = ((1, 1024), (16, 1024), (1, 32768))
"""Points at which prefill is measured with real forwards."""


@dataclass(frozen=True)
class Case:
    """Describes the speculation and the page size of a server.

    Attributes:
        speculate: none, ngram, chain or tree.
        topk, num_steps, num_draft_tokens: shape of a chain or tree.
        accept: tokens that each verification commits.
    """

    speculate: str
    page_size: int
    topk: int = 1
    num_steps: int = 1
    num_draft_tokens: int = 1
    accept: int = 1

    @property
    def name(self) -> str:
        """Name in the rows."""
        if self.speculate == "ngram":
            return f"ngram({self.num_draft_tokens})"
        shape = "" if self.topk == 1 else f"({self.topk},{self.num_steps},{self.num_draft_tokens})"
        return f"{self.speculate}{shape}"

    @property
    def reserved(self) -> int:
        """Tokens that SGLang reserves per request: two rounds of drafts and two pages; one page without drafts."""
        if self.speculate == "none":
            return self.page_size
        return 2 * max(self.topk * self._of_a_branch, self.num_draft_tokens) + 2 * self.page_size

    @property
    def _of_a_branch(self) -> int:
        """Slots that SGLang reserves per branch: one per step, or whole pages if a branch starts with a copied page."""
        if self.page_size == 1 or self.topk == 1:
            return self.num_steps
        return (self.page_size - 1 + self.num_steps + self.page_size - 1) // self.page_size * self.page_size


@dataclass(frozen=True)
class Server:
    """Describes one server process: its case, SGLang's name of its attention backend, and its points to measure.

    Attributes:
        prefill: True if prefill is measured too.
        profiled: number of points at which kernels are recorded too.
    """

    case: Case
    backend: str
    points: tuple[tuple[int, int], ...] = POINTS
    prefill: bool = False
    profiled: int = 0

    @property
    def name(self) -> str:
        """Name in the record's list of missing servers."""
        return f"{self.backend} {self.case.name} page {self.case.page_size}"

    @property
    def tokens(self) -> int:
        """Number of KV slots: for all requests of the largest point, with decoded and reserved tokens, plus 4 %."""
        most = max(requests * (length + NEW + self.case.reserved) for requests, length in self.points)
        return int(most * 1.04) // 64 * 64


NEW = 192
"""Largest number of tokens that a request decodes at a point with many requests."""


def plain(page_size: int) -> Case:
    """Return a case without drafts."""
    return Case("none", page_size)


def chain(page_size: int) -> Case:
    """Return a case with a chain of three draft tokens."""
    return Case("chain", page_size, 1, 3, 4, 3)


def tree(page_size: int, topk: int, num_steps: int, num_draft_tokens: int, accept: int) -> Case:
    """Return a case in which an EAGLE head drafts a tree."""
    return Case("tree", page_size, topk, num_steps, num_draft_tokens, accept)


def tree16(page_size: int) -> Case:
    """Return a case with trees of 16 nodes: topk 4, 4 steps, 4 accepted tokens."""
    return tree(page_size, 4, 4, 16, 4)


def tree32(page_size: int) -> Case:
    """Return a case with trees of 32 nodes: topk 8, 4 steps, 4 accepted tokens."""
    return tree(page_size, 8, 4, 32, 4)


def tree48(page_size: int) -> Case:
    """Return a case with trees of 48 nodes: topk 8, 6 steps, 5 accepted tokens."""
    return tree(page_size, 8, 6, 48, 5)


def ngram(page_size: int) -> Case:
    """Return a case with n-gram drafts of 16 nodes, which SGLang looks up in the earlier text."""
    return Case("ngram", page_size, num_draft_tokens=16, accept=3)


ALL = len(POINTS)
WAVES = (
    (
        Server(plain(64), "draftmark", LONG, prefill=True, profiled=ALL),
        Server(plain(64), "fa3", LONG, prefill=True, profiled=4),
        Server(tree32(1), "draftmark", profiled=ALL),
        Server(tree32(1), "fa3", profiled=1),
        Server(chain(64), "draftmark", LONG, profiled=ALL),
        Server(chain(64), "fa3", LONG, profiled=1),
        Server(tree16(1), "draftmark", profiled=ALL),
        Server(tree16(1), "fa3"),
        Server(tree48(1), "draftmark", profiled=ALL),
        Server(tree48(1), "fa3"),
    ),
    (
        Server(tree32(64), "draftmark", profiled=ALL),
        Server(tree32(64), "fa3", profiled=1),
        Server(tree16(64), "draftmark", profiled=2),
        Server(tree16(64), "fa3"),
        Server(tree48(64), "draftmark"),
        Server(tree48(64), "fa3"),
        Server(ngram(1), "draftmark", profiled=ALL),
        Server(ngram(1), "fa3"),
        Server(ngram(64), "draftmark"),
        Server(plain(1), "draftmark", FEW),
        Server(plain(1), "fa3", FEW),
        Server(chain(1), "draftmark", FEW),
        Server(chain(1), "fa3", FEW),
    ),
    (
        Server(tree32(16), "draftmark"),
        Server(tree32(16), "fa3"),
        Server(tree16(16), "draftmark"),
        Server(tree16(16), "fa3"),
        Server(tree48(16), "draftmark"),
        Server(tree48(16), "fa3"),
        Server(ngram(16), "draftmark"),
        Server(plain(16), "draftmark", FEW),
        Server(plain(16), "fa3", FEW),
        Server(chain(16), "draftmark", FEW),
        Server(plain(64), "triton", LONG, prefill=True),
        Server(tree32(1), "triton"),
        Server(tree48(1), "triton"),
    ),
    (
        Server(plain(64), "flashinfer", LONG, prefill=True),
        Server(tree32(1), "flashinfer", profiled=1),
        Server(tree16(1), "flashinfer"),
        Server(tree48(1), "flashinfer"),
        Server(ngram(1), "flashinfer"),
        Server(chain(64), "flashinfer", LONG),
        Server(ngram(64), "flashinfer"),
        Server(tree16(64), "flashinfer"),
        Server(tree32(16), "flashinfer"),
        Server(tree48(64), "flashinfer"),
    ),
    (
        Server(chain(64), "triton", LONG),
        Server(tree16(1), "triton"),
        Server(ngram(1), "triton"),
        Server(tree48(64), "triton"),
        Server(tree16(64), "triton"),
    ),
)
"""Waves of servers that fit one GPU together. A wave starts together and is measured one server after another.

The most informative servers come first, in case time runs out. The first wave is smaller, because the servers of
`texts` start with it. FlashInfer has its own wave, because it compiles kernels for minutes.
"""
SERVERS = tuple(server for wave in WAVES for server in wave)
